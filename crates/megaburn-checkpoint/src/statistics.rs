use burn::tensor::TensorData;

use crate::{
    error::CheckpointError,
    source::{TensorHeader, TensorSource},
    values::for_each_batch,
};

/// Bytes of a tensor that are read at once.
const BLOCK: usize = 16 << 20;

/// What the values of a tensor are like. Sums are computed in f64. Values that are not finite are
/// counted and otherwise left out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TensorStatistics {
    /// Number of elements.
    pub num_values: u64,
    /// The mean of the finite values; NaN if there are none.
    pub mean: f64,
    /// The standard deviation of the finite values, divided by their number and not by one less;
    /// NaN if there are none.
    pub std: f64,
    /// The smallest finite value; NaN if there are none.
    pub min: f64,
    /// The largest finite value; NaN if there are none.
    pub max: f64,
    /// The L2 norm of the finite values: the square root of the sum of their squares.
    pub norm: f64,
    /// Number of zeros, of either sign.
    pub num_zeros: u64,
    /// Number of NaNs.
    pub num_nan: u64,
    /// Number of infinite values, of either sign.
    pub num_infinite: u64,
}

impl TensorStatistics {
    /// The share of zeros among all elements; 0 for a tensor without elements.
    pub fn share_of_zeros(&self) -> f64 {
        self.num_zeros as f64 / (self.num_values.max(1)) as f64
    }
}

/// Computes the statistics of the tensor that `header` names. A block of rows of about 16 MiB (or a
/// single row, if that is larger) is in memory.
///
/// # Errors
/// The source does not have the tensor, or cannot be read.
pub fn statistics(
    source: &dyn TensorSource,
    header: &TensorHeader,
) -> Result<TensorStatistics, CheckpointError> {
    let mut sums = Sums::default();
    for rows in header.blocks(BLOCK) {
        sums.add(&source.read_rows(&header.name, rows)?);
    }
    Ok(sums.finish())
}

/// The statistics of the values so far.
#[derive(Debug)]
struct Sums {
    num_values: u64,
    num_finite: u64,
    num_zeros: u64,
    num_nan: u64,
    mean: f64,
    /// The sum of the squared distances from the mean.
    spread: f64,
    squares: f64,
    min: f64,
    max: f64,
}

impl Default for Sums {
    fn default() -> Self {
        Self {
            num_values: 0,
            num_finite: 0,
            num_zeros: 0,
            num_nan: 0,
            mean: 0.0,
            spread: 0.0,
            squares: 0.0,
            min: f64::INFINITY,
            max: f64::NEG_INFINITY,
        }
    }
}

impl Sums {
    fn add(&mut self, data: &TensorData) {
        for_each_batch(data.dtype(), data.as_bytes(), |values| {
            self.add_batch(values)
        });
    }

    /// Adds a batch whose own mean and spread are computed in two passes, which is exact also where
    /// the mean is much larger than the standard deviation.
    ///
    /// Source: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing
    /// Sample Variances", 1979.
    fn add_batch(&mut self, values: &[f64]) {
        let mut count = 0u64;
        let mut sum = 0.0;
        for &value in values {
            if value.is_finite() {
                count += 1;
                sum += value;
                self.squares += value * value;
                self.num_zeros += u64::from(value == 0.0);
                self.min = self.min.min(value);
                self.max = self.max.max(value);
            } else {
                self.num_nan += u64::from(value.is_nan());
            }
        }
        self.num_values += values.len() as u64;
        if count == 0 {
            return;
        }
        let mean = sum / count as f64;
        let finite = values.iter().filter(|value| value.is_finite());
        let spread: f64 = finite.map(|value| (value - mean) * (value - mean)).sum();
        let before = self.num_finite as f64;
        let total = before + count as f64;
        let off = mean - self.mean;
        self.mean += off * (count as f64 / total);
        self.spread += spread + off * off * (before * (count as f64 / total));
        self.num_finite += count;
    }

    fn finish(self) -> TensorStatistics {
        let has_values = self.num_finite > 0;
        let if_any = |value: f64| if has_values { value } else { f64::NAN };
        TensorStatistics {
            num_values: self.num_values,
            mean: if_any(self.mean),
            std: if_any((self.spread / self.num_finite as f64).sqrt()),
            min: if_any(self.min),
            max: if_any(self.max),
            norm: self.squares.sqrt(),
            num_zeros: self.num_zeros,
            num_nan: self.num_nan,
            num_infinite: self.num_values - self.num_finite - self.num_nan,
        }
    }
}
