use burn::config::Config;
use burn::tensor::{Device, Int, Tensor, TensorData};

use super::checks::check;
use super::scaling::RopeScaling;
use crate::error::KernelError;

/// Which elements of a head form the pairs that are rotated.
#[derive(Config, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeLayout {
    /// Element `i` of the first half and element `i` of the second (Llama and GPT-NeoX; the default
    /// of Hugging Face and Megatron).
    Halves,
    /// Elements `2i` and `2i + 1` (the RoPE paper, GPT-J; Megatron's `rotary_interleaved`).
    Interleaved,
}

/// The configuration of a [`RopeTable`].
#[derive(Config, Debug, PartialEq)]
pub struct RopeConfig {
    /// The size of a head.
    pub head_dim: usize,
    /// The base of the frequencies, `theta^(-2i / d)` for `d` rotated elements.
    #[config(default = 10000.0)]
    pub theta: f64,
    /// The scaling of the frequencies for longer contexts.
    #[config(default = "RopeScaling::None")]
    pub scaling: RopeScaling,
    /// Which elements of a head form pairs.
    #[config(default = "RopeLayout::Halves")]
    pub layout: RopeLayout,
    /// The fraction of a head, from its start, that is rotated; the rest passes through (Megatron's
    /// `rotary_percent`, Hugging Face's `partial_rotary_factor`). The number of rotated elements is
    /// rounded down and must be even.
    #[config(default = 1.0)]
    pub rotary_percent: f64,
}

impl RopeConfig {
    /// Computes the table for `positions` that all sequences of a batch have: a range, the
    /// positions of a context-parallel rank, or [`packed_positions`](crate::packed_positions).
    ///
    /// Angles are computed in f64 on the host. The table is created on the device without autodiff,
    /// whether or not `device` has it.
    ///
    /// # Errors
    /// If the rotated part of a head has no pairs, or a parameter is not a finite number in its
    /// range.
    pub fn init(
        &self,
        positions: impl IntoIterator<Item = usize>,
        device: &Device,
    ) -> Result<RopeTable, KernelError> {
        let positions: Vec<usize> = positions.into_iter().collect();
        let len = length(&positions);
        self.table(positions.len(), 1, |s, _| (positions[s], len), device)
    }

    /// Computes the table for `positions` with the lengths of their sequences, which some
    /// [scalings](RopeScaling) depend on. [`init`](Self::init) takes the last position of all for
    /// the end of the sequence.
    ///
    /// # Errors
    /// As [`init`](Self::init).
    pub fn init_at(
        &self,
        positions: impl IntoIterator<Item = (usize, usize)>,
        device: &Device,
    ) -> Result<RopeTable, KernelError> {
        let positions: Vec<(usize, usize)> = positions.into_iter().collect();
        self.table(positions.len(), 1, |s, _| positions[s], device)
    }

    /// Computes the table for a batch whose sequences have different positions, e.g. packed
    /// sequences with documents of different lengths. Otherwise like [`init`](Self::init).
    ///
    /// # Shapes
    /// `b` sequences of `s` positions
    ///
    /// # Errors
    /// As [`init`](Self::init); or if there are no sequences, or their lengths differ.
    pub fn init_each<P: AsRef<[usize]>>(
        &self,
        sequences: &[P],
        device: &Device,
    ) -> Result<RopeTable, KernelError> {
        let lengths = || sequences.iter().map(|positions| positions.as_ref().len());
        let s = lengths().next().unwrap_or(0);
        if sequences.is_empty() || lengths().any(|length| length != s) {
            return Err(KernelError::RopeSequences {
                lengths: lengths().collect(),
            });
        }
        let lens: Vec<usize> = sequences.iter().map(|of| length(of.as_ref())).collect();
        let at = |s: usize, b: usize| (sequences[b].as_ref()[s], lens[b]);
        self.table(s, sequences.len(), at, device)
    }

    fn table(
        &self,
        s: usize,
        b: usize,
        position: impl Fn(usize, usize) -> (usize, usize),
        device: &Device,
    ) -> Result<RopeTable, KernelError> {
        let mut of_len = 0;
        let mut frequencies = self.frequencies()?;
        let factor = self.scaling.table_factor();
        let mut cos = Vec::new();
        let mut sin = Vec::new();
        for (s, b) in (0..s).flat_map(|s| (0..b).map(move |b| (s, b))) {
            let (position, len) = position(s, b);
            if len != of_len {
                of_len = len;
                frequencies = self.frequencies_at(len)?;
            }
            let position = position as f64;
            for frequency in &frequencies {
                let (s, c) = (position * frequency).sin_cos();
                cos.push((factor * c) as f32);
                sin.push((factor * s) as f32);
            }
        }
        let device = device.clone().inner();
        let shape = [s, b, frequencies.len()];
        let tensor = |data| Tensor::from_data(TensorData::new(data, shape), &device);
        let Self {
            head_dim, layout, ..
        } = *self;
        Ok(RopeTable {
            cos: tensor(cos),
            sin: tensor(sin),
            head_dim,
            layout,
        })
    }

    /// The angle per position of each pair of elements, in radians; half as many as rotated
    /// elements. Scalings that depend on the length of sequences are those of the shortest ones.
    ///
    /// # Errors
    /// As [`init`](Self::init).
    pub fn frequencies(&self) -> Result<Vec<f64>, KernelError> {
        self.frequencies_at(0)
    }

    /// [`frequencies`](Self::frequencies) in sequences of `len` positions.
    ///
    /// # Errors
    /// As [`init`](Self::init).
    pub fn frequencies_at(&self, len: usize) -> Result<Vec<f64>, KernelError> {
        let Self {
            head_dim,
            rotary_percent,
            ..
        } = *self;
        let d = (head_dim as f64 * rotary_percent) as usize;
        if d == 0 || !d.is_multiple_of(2) || d > head_dim {
            return Err(KernelError::RopeHeadDim {
                head_dim,
                rotary_percent,
                rotated: d,
            });
        }
        check("theta", self.theta, 0.0)?;
        self.scaling.check(self.theta)?;
        if let RopeScaling::Long(long) = &self.scaling {
            long.check_pairs(d / 2)?;
        }
        let base = self.scaling.base(self.theta, len, d);
        let plain = (0..d / 2).map(|i| base.powf(-2.0 * i as f64 / d as f64));
        Ok(self.scaling.apply(self.theta, plain.collect(), len))
    }
}

/// The number of positions up to the last of all.
fn length(positions: &[usize]) -> usize {
    positions.iter().max().map_or(0, |last| last + 1)
}

/// Cosines and sines of positions, in f32, on a device without autodiff. With
/// [`YarnScaling`](crate::YarnScaling) they are multiplied by a factor.
#[derive(Clone, Debug)]
pub struct RopeTable {
    cos: Tensor<3>,
    sin: Tensor<3>,
    head_dim: usize,
    layout: RopeLayout,
}

impl RopeTable {
    /// The cosines, `[s, 1, d / 2]` for `d` rotated elements, or `[s, b, d / 2]` if each sequence
    /// has its own positions.
    pub fn cos(&self) -> &Tensor<3> {
        &self.cos
    }

    /// The sines, with the shape of the cosines.
    pub fn sin(&self) -> &Tensor<3> {
        &self.sin
    }

    /// Gathers table rows for each sequence of a batch, each in its own order, e.g. for
    /// concatenated documents.
    ///
    /// # Shapes
    /// From a table whose positions are common to all sequences, `[s, 1, d / 2]`, and `b` sequences
    /// of `n` row indices, to `[n, b, d / 2]`
    ///
    /// # Panics
    /// If the table already is per sequence, or the index lists have different lengths.
    pub fn rows<P: AsRef<[usize]>>(&self, sequences: &[P]) -> Self {
        let [positions, one, half] = self.cos.dims();
        let n = sequences.first().map_or(0, |rows| rows.as_ref().len());
        let b = sequences.len();
        assert!(
            one == 1 && sequences.iter().all(|rows| rows.as_ref().len() == n),
            "RopeTable::rows: the sequences must have the same length, and the table 1 sequence, \
            not {one}"
        );
        let rows = (0..n).flat_map(|at| sequences.iter().map(move |rows| rows.as_ref()[at] as i64));
        let rows = TensorData::new(rows.collect::<Vec<_>>(), [n * b]);
        let rows = Tensor::<1, Int>::from_data(rows, &self.cos.device());
        let taken = |table: &Tensor<3>| {
            let table = table.clone().reshape([positions, half]);
            table.select(0, rows.clone()).reshape([n, b, half])
        };
        Self {
            cos: taken(&self.cos),
            sin: taken(&self.sin),
            ..*self
        }
    }

    /// The number of positions per sequence.
    pub fn num_positions(&self) -> usize {
        self.cos.dims()[0]
    }

    /// The size of the heads.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Which elements of a head form pairs.
    pub fn layout(&self) -> RopeLayout {
        self.layout
    }
}

#[cfg(test)]
mod tests {
    use megaburn_autograd::testing::{assert_same_bits, device, values};
    use rstest::rstest;

    use super::*;

    #[test]
    fn a_table_is_untracked_and_holds_any_positions() {
        let table = RopeConfig::new(4)
            .with_theta(100.0)
            .init([7, 0, 3], &device())
            .unwrap();
        assert!(!table.cos().device().is_autodiff());
        assert_eq!((table.num_positions(), table.sin().dims()), (3, [3, 1, 2]));
        // The frequencies are 1 and 0.1.
        let expected = [7.0f64, 0.7, 0.0, 0.0, 3.0, 0.3];
        for (value, angle) in values(table.cos().clone()).into_iter().zip(expected) {
            assert!((value - angle.cos()).abs() < 1e-7);
        }
        for (value, angle) in values(table.sin().clone()).into_iter().zip(expected) {
            assert!((value - angle.sin()).abs() < 1e-7);
        }
    }

    #[rstest]
    #[case(
        RopeConfig::new(7),
        "rotates 7 elements (rotary_percent 1 of head_dim 7)"
    )]
    #[case(RopeConfig::new(0), "of head_dim 0")]
    #[case(RopeConfig::new(12).with_rotary_percent(0.25), "rotates 3 elements (rotary_percent 0.25 of head_dim 12)")]
    #[case(RopeConfig::new(8).with_rotary_percent(1.25), "rotates 10 elements")]
    #[case(RopeConfig::new(8).with_rotary_percent(-1.0), "rotates 0 elements")]
    #[case(RopeConfig::new(8).with_rotary_percent(f64::NAN), "rotates 0 elements")]
    #[case(RopeConfig::new(8).with_theta(0.0), "theta is 0, but must be a finite number greater than 0")]
    #[case(RopeConfig::new(8).with_scaling(RopeScaling::Linear { factor: 0.0 }), "factor is 0")]
    fn a_table_that_cannot_be_is_refused(#[case] config: RopeConfig, #[case] message: &str) {
        let error = config.init(0..2, &device()).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }

    #[test]
    fn a_part_of_a_head_has_the_frequencies_of_a_head_of_that_size() {
        let part = RopeConfig::new(16).with_rotary_percent(0.5);
        assert_eq!(
            part.frequencies().unwrap(),
            RopeConfig::new(8).frequencies().unwrap()
        );
        assert_eq!(part.init(0..3, &device()).unwrap().head_dim(), 16);
    }

    #[test]
    fn each_sequence_has_the_rows_of_its_positions() {
        let config = RopeConfig::new(6);
        let each = config
            .init_each(&[[0, 1, 2], [5, 0, 1]], &device())
            .unwrap();
        assert_eq!((each.num_positions(), each.cos().dims()), (3, [3, 2, 3]));
        for (b, positions) in [[0, 1, 2], [5, 0, 1]].into_iter().enumerate() {
            let alone = config.init(positions, &device()).unwrap();
            assert_same_bits(each.cos().clone().narrow(1, b, 1), alone.cos().clone());
            assert_same_bits(each.sin().clone().narrow(1, b, 1), alone.sin().clone());
        }
        let rows = config
            .init(0..6, &device())
            .unwrap()
            .rows(&[[0, 1, 2], [5, 0, 1]]);
        assert_same_bits(rows.cos().clone(), each.cos().clone());
        assert_same_bits(rows.sin().clone(), each.sin().clone());
    }

    #[test]
    fn sequences_of_different_lengths_are_refused() {
        let sequences = [vec![0, 1, 2], vec![0, 1]];
        let error = RopeConfig::new(6)
            .init_each(&sequences, &device())
            .unwrap_err();
        assert!(
            error.to_string().contains("have [3, 2] positions"),
            "{error}"
        );
        assert!(
            RopeConfig::new(6)
                .init_each::<Vec<usize>>(&[], &device())
                .is_err()
        );
    }
}
