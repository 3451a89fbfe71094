//! ALiBi: attention scores fall with the distance between query and key, by a slope of each head.
//!
//! In a softmax over keys, `-slope * (query - key)` is the same as `slope * key`, the product of one
//! feature of the query and one of the key. So heads are made a few features wider, and every kernel
//! of attention computes ALiBi.
//!
//! Source: Press et al., "Train short, test long" (2022), <https://arxiv.org/abs/2108.12409>;
//! Transformers `models/bloom/modeling_bloom.py`, `build_alibi_tensor`.

use burn::{
    config::Config,
    prelude::Device,
    tensor::{DType, Tensor, TensorData},
};

/// Features that ALiBi adds to the queries and keys of a head. Kernels need multiples of 8.
pub const ALIBI_FEATURES: usize = 8;

/// A position is split into digits of this base, which bf16 and f16 represent exactly.
const BASE: usize = 256;
const DIGITS: usize = 3;

/// The form of ALiBi.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub struct Alibi {
    /// Whether the bias is multiplied by the scale of the scores, from slopes that are rounded to
    /// bf16 (Falcon).
    #[config(default = false)]
    pub scaled: bool,
}

impl Alibi {
    /// The slopes of all heads. If their number is no power of two, the first heads have the slopes
    /// for the next smaller power of two, and the others have slopes between these, as in BLOOM.
    pub fn slopes(self, heads: usize) -> Vec<f64> {
        let whole = 1 << heads.max(1).ilog2();
        let slope = |head: usize, of: usize| 2f64.powf(-8.0 * head as f64 / of as f64);
        let plain = (1..=whole).map(|head| slope(head, whole));
        let between = (0..heads - whole).map(|head| slope(2 * head + 1, 2 * whole));
        let slopes = plain.chain(between);
        if self.scaled {
            slopes.map(rounded).collect()
        } else {
            slopes.collect()
        }
    }

    /// The largest feature of a query, for `scale` as factor of the scores. It must be in the range of
    /// the type of the activations, which f16 may be too narrow for.
    pub fn largest_feature(self, heads: usize, scale: f64) -> f64 {
        let slopes = self.slopes(heads).into_iter();
        let slopes = slopes.map(|slope| self.slope_in_product(slope, scale).abs());
        slopes.fold(0.0, f64::max) * factors(1).0
    }

    /// The slope as a factor of the product of query and key, which `scale` multiplies.
    fn slope_in_product(self, slope: f64, scale: f64) -> f64 {
        if self.scaled { slope } else { slope / scale }
    }

    /// The features of queries whose heads have these slopes, `[1, 1, heads, features]`. `scale` is
    /// the factor of the scores.
    pub(super) fn of_queries(
        self,
        slopes: &[f64],
        scale: f64,
        device: &Device,
        dtype: DType,
    ) -> Tensor<4> {
        let mut features = Vec::with_capacity(slopes.len() * ALIBI_FEATURES);
        for slope in slopes {
            let slope = self.slope_in_product(*slope, scale);
            for digit in 0..DIGITS {
                // Two numbers in bf16 have twice its precision.
                let slope = slope * factors(digit).0;
                let high = rounded(slope);
                features.extend([high as f32, (slope - high) as f32]);
            }
            features.extend([0.0; ALIBI_FEATURES - 2 * DIGITS]);
        }
        let shape = [1, 1, slopes.len(), ALIBI_FEATURES];
        Tensor::<4>::from_data(TensorData::new(features, shape), device).cast(dtype)
    }
}

/// The factors of a digit in the features of queries and of keys. Their product is the digit's place
/// value, which alone would exceed the range of f16.
fn factors(digit: usize) -> (f64, f64) {
    let base = BASE as f64;
    match digit {
        0 => (1.0, 1.0),
        _ => (base, base.powi(digit as i32 - 1)),
    }
}

/// `x` with the precision of bf16.
fn rounded(x: f64) -> f64 {
    f64::from(half::bf16::from_f64(x))
}

/// The features of keys at some positions, on a device without autodiff.
#[derive(Clone, Debug)]
pub struct AlibiKeys {
    /// `[s, b or 1, 1, features]`
    features: Tensor<4>,
}

impl AlibiKeys {
    /// The features of `s` positions that all sequences have.
    pub fn new(positions: &[usize], device: &Device) -> Self {
        Self::of_each(&[positions], device)
    }

    /// The features of sequences with positions of their own.
    ///
    /// # Panics
    /// If the sequences have different lengths.
    pub fn of_each<P: AsRef<[usize]>>(sequences: &[P], device: &Device) -> Self {
        let len = sequences.first().map_or(0, |of| of.as_ref().len());
        let mut features = Vec::with_capacity(len * sequences.len() * ALIBI_FEATURES);
        for at in 0..len {
            for sequence in sequences {
                let mut rest = sequence.as_ref()[at];
                for digit in 0..DIGITS {
                    let value = (rest % BASE) as f64 * factors(digit).1;
                    features.extend([value as f32; 2]);
                    rest /= BASE;
                }
                features.extend([0.0; ALIBI_FEATURES - 2 * DIGITS]);
            }
        }
        let shape = [len, sequences.len(), 1, ALIBI_FEATURES];
        let data = TensorData::new(features, shape);
        Self {
            features: Tensor::from_data(data, &device.clone().inner()),
        }
    }

    /// Number of positions of a sequence.
    pub fn num_positions(&self) -> usize {
        self.features.dims()[0]
    }

    /// Adds the features to `keys`, `[s, b, heads, head_dim]`.
    pub(super) fn added_to(&self, keys: Tensor<4>) -> Tensor<4> {
        with_features(keys, self.features.clone())
    }
}

/// Appends `features`, which are broadcast, to the features of each head of `x`.
pub(super) fn with_features(x: Tensor<4>, features: Tensor<4>) -> Tensor<4> {
    let [s, b, heads, _] = x.dims();
    let features = features
        .cast(x.dtype())
        .expand([s, b, heads, ALIBI_FEATURES]);
    let features = if x.device().is_autodiff() {
        Tensor::from_inner(features)
    } else {
        features
    };
    Tensor::cat(vec![x, features], 3)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// From Transformers' `build_alibi_tensor`, in f32.
    #[rstest]
    #[case(1, &[0.003_906_25])]
    #[case(4, &[0.25, 0.0625, 0.015_625, 0.003_906_25])]
    #[case(6, &[0.25, 0.0625, 0.015_625, 0.003_906_25, 0.5, 0.125])]
    #[case(3, &[0.0625, 0.003_906_25, 0.25])]
    fn the_slopes_are_those_of_bloom(#[case] heads: usize, #[case] expected: &[f64]) {
        assert_eq!(Alibi::new().slopes(heads), expected);
    }

    #[test]
    fn the_largest_feature_of_a_query_is_known() {
        for (alibi, scale) in [(Alibi::new(), 2e-3), (Alibi::new().with_scaled(true), 2e-3)] {
            let slopes = alibi.slopes(6);
            let queries = alibi.of_queries(&slopes, scale, &Device::flex(), DType::F32);
            let largest = queries.max().into_scalar::<f32>();
            let found = alibi.largest_feature(6, scale);
            assert!(
                (found / f64::from(largest) - 1.0).abs() < 1e-2,
                "{found} {largest}"
            );
        }
    }

    #[rstest]
    fn products_of_features_are_slopes_times_positions(
        #[values(DType::F32, DType::BF16, DType::F16)] dtype: DType,
        #[values(false, true)] scaled: bool,
    ) {
        let device = Device::flex();
        let alibi = Alibi::new().with_scaled(scaled);
        let slopes = alibi.slopes(6);
        let scale = 0.3;
        let positions = [0, 1, 255, 256, 70_001];
        let queries = alibi.of_queries(&slopes, scale, &device, dtype);
        let keys = AlibiKeys::new(&positions, &device).features.cast(dtype);
        let [queries, keys] = [queries, keys].map(|x| x.cast(DType::F64));
        let found = queries.reshape([6, ALIBI_FEATURES]);
        let found = found.matmul(keys.reshape([5, ALIBI_FEATURES]).transpose());
        let found: Vec<f64> = found.into_data().iter().collect();
        for (head, slope) in slopes.iter().enumerate() {
            for (at, position) in positions.iter().enumerate() {
                let slope = if scaled { *slope } else { slope / scale };
                let expected = slope * *position as f64;
                let found = found[head * 5 + at];
                assert!(
                    (found - expected).abs() <= 3e-5 * expected.max(1e-9),
                    "{found} is not {expected}"
                );
            }
        }
    }
}
