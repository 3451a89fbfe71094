//! Sums over the elements of a tensor, from which its statistics follow.

use burn::tensor::{DType, Tensor};

/// Sums over the elements of one or several tensors. Squares and the largest magnitude are those of
/// the finite elements.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ElementSums {
    /// The number of elements.
    pub count: f64,
    /// The sum of squares.
    pub squares: f64,
    /// The largest magnitude.
    pub max_abs: f64,
    /// The number of zeros.
    pub zeros: f64,
    /// The number of elements that are infinite or NaN.
    pub non_finite: f64,
}

/// The sums of a tensor, which are still on its device.
#[derive(Clone, Debug)]
pub struct PendingSums {
    count: f64,
    /// `[4]`: squares, largest magnitude, zeros, non-finite elements.
    sums: Tensor<1>,
}

impl PendingSums {
    /// The sums of `x`, which must be off the autodiff device and not empty.
    pub fn of<const D: usize>(x: Tensor<D>) -> Self {
        let len = x.shape().num_elements();
        let x: Tensor<1> = x.reshape([len as i64]).cast(DType::F32);
        // A number times zero is zero, unless it is not finite.
        let is_bad = x.clone().mul_scalar(0.0).equal_elem(0.0).bool_not();
        let zeros = x.clone().equal_elem(0.0).float().sum();
        let finite = x.mask_fill(is_bad.clone(), 0.0);
        let non_finite = is_bad.float().sum();
        let squares = (finite.clone() * finite.clone()).sum();
        let max_abs = finite.abs().max();
        Self {
            count: len as f64,
            sums: Tensor::cat(vec![squares, max_abs, zeros, non_finite], 0),
        }
    }

    /// Reads sums from their device, in one transfer.
    ///
    /// # Errors
    /// The device cannot be read; the error is its message.
    pub fn read(all: &[Self]) -> Result<Vec<ElementSums>, String> {
        if all.is_empty() {
            return Ok(Vec::new());
        }
        let sums = all.iter().map(|pending| pending.sums.clone()).collect();
        let read = Tensor::cat(sums, 0).try_into_data();
        let read = read.map_err(|error| error.to_string())?;
        let read: Vec<f64> = read.iter::<f64>().collect();
        let sums = |(pending, sums): (&Self, &[f64])| ElementSums {
            count: pending.count,
            squares: sums[0],
            max_abs: sums[1],
            zeros: sums[2],
            non_finite: sums[3],
        };
        Ok(all.iter().zip(read.chunks(4)).map(sums).collect())
    }
}

impl ElementSums {
    /// Adds the elements of another tensor.
    pub fn add(&mut self, other: Self) {
        self.count += other.count;
        self.squares += other.squares;
        self.max_abs = self.max_abs.max(other.max_abs);
        self.zeros += other.zeros;
        self.non_finite += other.non_finite;
    }

    /// The sums of all elements times `factor`.
    #[must_use]
    pub fn times(self, factor: f64) -> Self {
        Self {
            squares: self.squares * factor * factor,
            max_abs: self.max_abs * factor.abs(),
            ..self
        }
    }

    /// As numbers, in the order of the fields.
    pub fn to_array(self) -> [f64; 5] {
        [
            self.count,
            self.squares,
            self.max_abs,
            self.zeros,
            self.non_finite,
        ]
    }

    /// From [`to_array`](Self::to_array).
    pub fn from_array([count, squares, max_abs, zeros, non_finite]: [f64; 5]) -> Self {
        Self {
            count,
            squares,
            max_abs,
            zeros,
            non_finite,
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn each_element_is_counted_once_and_bad_ones_apart() {
        let device = Device::flex();
        let x = [
            3.0,
            0.0,
            -4.0,
            f32::NAN,
            f32::INFINITY,
            -0.0,
            1.0,
            f32::NEG_INFINITY,
        ];
        let x = Tensor::<1>::from_floats(x, &device).reshape([2, 4]);
        let y = Tensor::<3>::full([2, 1, 3], -7.0, &device).cast(DType::BF16);
        let pending: [PendingSums; 2] = [PendingSums::of::<2>(x), PendingSums::of(y)];
        let found = PendingSums::read(&pending).unwrap();
        assert_eq!(found[0].to_array(), [8.0, 26.0, 4.0, 2.0, 3.0]);
        assert_eq!(found[1].to_array(), [6.0, 6.0 * 49.0, 7.0, 0.0, 0.0]);
        let mut both = found[0];
        both.add(found[1].times(2.0));
        assert_eq!(both.to_array(), [14.0, 26.0 + 4.0 * 294.0, 14.0, 2.0, 3.0]);
        assert_eq!(ElementSums::from_array(both.to_array()), both);
        assert_eq!(PendingSums::read(&[]), Ok(Vec::new()));
    }
}
