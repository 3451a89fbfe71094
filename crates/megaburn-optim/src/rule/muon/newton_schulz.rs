use burn::{
    Tensor,
    tensor::{DType, FloatDType},
};
use megaburn_kernels::{GemmAlgorithm, LinearOptions, linear};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::OptimError;

/// The coefficients of the iteration that makes a matrix nearly orthogonal. Each step is `x = a x +
/// (b s + c s²) x` with `s = x xᵀ`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[derive(JsonSchema)]
pub enum NewtonSchulz {
    /// Keller Jordan's original coefficients, the same in every step.
    Simple,
    /// Five different sets of coefficients, repeated.
    #[default]
    Quintic,
    /// Amsel et al. 2025, <https://arxiv.org/abs/2505.16932>: eight sets, the last of which
    /// repeats.
    PolarExpress,
}

impl NewtonSchulz {
    /// `(a, b, c)` for each of `steps` steps.
    ///
    /// Source: the coefficient sets of NVIDIA's Emerging-Optimizers, which Megatron-LM uses.
    pub(super) fn coefficients(self, steps: usize) -> Vec<[f64; 3]> {
        let sets: &[[f64; 3]] = match self {
            Self::Simple => &[[3.4445, -4.7750, 2.0315]],
            Self::Quintic => &[
                [4.0848, -6.8946, 2.9270],
                [3.9505, -6.3029, 2.6377],
                [3.7418, -5.5913, 2.3037],
                [2.8769, -3.1427, 1.2046],
                [2.8366, -3.0525, 1.2012],
            ],
            Self::PolarExpress => &[
                [8.2051, -22.9019, 16.4607],
                [4.0664, -2.8612, 0.5184],
                [3.9096, -2.8234, 0.5250],
                [3.2856, -2.4153, 0.4853],
                [2.2779, -1.6198, 0.3985],
                [1.8726, -1.2307, 0.3585],
                [1.8564, -1.2132, 0.3568],
                [1.8750, -1.2500, 0.3750],
            ],
        };
        let at = |step: usize| match self {
            Self::PolarExpress => step.min(sets.len() - 1),
            Self::Simple | Self::Quintic => step % sets.len(),
        };
        (0..steps).map(|step| sets[at(step)]).collect()
    }

    /// The requirement on the number of steps, so that the iteration ends where its coefficients
    /// are designed to end, and whether `steps` meets it.
    pub fn check_steps(self, steps: usize) -> (&'static str, bool) {
        match self {
            Self::Simple => ("at least 1", steps >= 1),
            Self::Quintic => {
                let ok = steps >= 1 && steps.is_multiple_of(5);
                ("a multiple of 5 with quintic coefficients", ok)
            }
            Self::PolarExpress => ("at least 8 with polar_express coefficients", steps >= 8),
        }
    }
}

/// A matrix whose norm is below this counts as zero.
const EPSILON: f32 = 1e-7;

/// Returns a matrix whose singular values are all near 1 and whose singular vectors are those of
/// `x`. The iteration is computed in `dtype`.
///
/// With `split`, `x` is this rank's slice of a matrix along the given dimension, and the function
/// sums a product over the ranks.
///
/// # Shapes
/// `[m, n]` to `[m, n]`, f32.
///
/// Source: Jordan et al. 2024, <https://kellerjordan.github.io/posts/muon>; Megatron-LM
/// `--optimizer muon`.
pub(super) fn orthogonalized(
    x: Tensor<2>,
    coefficients: &[[f64; 3]],
    dtype: FloatDType,
    split: Option<(usize, Sum<'_>)>,
) -> Result<Tensor<2>, OptimError> {
    let [rows, cols] = x.dims();
    let (split_dim, sum): (Option<usize>, Sum<'_>) = match split {
        Some((dim, sum)) => (Some(dim), sum),
        None => (None, &Ok),
    };
    // Multiply over the dimension that is split over ranks, or else over the longer one: `x xᵀ`
    // then is full on every rank, or small.
    let transposed = split_dim.map_or(rows > cols, |dim| dim == 0);
    let x = if transposed { x.transpose() } else { x };
    // Burn's `sum` adds in no fixed order on GPUs.
    let squares = sum(x.clone().square().sum_dim(1).sum_dim(0))?;
    let mut x = (x / squares.sqrt().clamp_min(EPSILON)).cast(DType::from(dtype));
    for &[a, b, c] in coefficients {
        let s = sum(product(x.clone(), x.clone(), true))?.cast(DType::from(dtype));
        let polynomial = s.clone().mul_scalar(b) + product(s.clone(), s, true).mul_scalar(c);
        x = x.clone().mul_scalar(a) + product(polynomial, x, false);
    }
    let x = x.cast(DType::F32);
    Ok(if transposed { x.transpose() } else { x })
}

/// Sums a tensor over the ranks.
pub(super) type Sum<'a> = &'a dyn Fn(Tensor<2>) -> Result<Tensor<2>, OptimError>;

/// `x y`, or `x yᵀ`; computed by cuBLASLt on GPUs. Ranks that hold copies each compute this themselves
/// and must get the same bits.
fn product(x: Tensor<2>, y: Tensor<2>, transpose: bool) -> Tensor<2> {
    linear(
        x,
        y,
        None,
        LinearOptions {
            out_in: transpose,
            algorithm: GemmAlgorithm::Deterministic,
            ..Default::default()
        },
    )
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Distribution};
    use rstest::rstest;

    use super::*;
    use crate::testing::values;

    fn random(shape: [usize; 2]) -> Tensor<2> {
        Tensor::random(shape, Distribution::Normal(0.0, 1.0), &Device::default())
    }

    /// The iteration in f64, by its definition.
    fn by_definition(x: &[f32], [rows, cols]: [usize; 2], coefficients: &[[f64; 3]]) -> Vec<f64> {
        let norm = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        let mut x: Vec<f64> = x.iter().map(|&x| f64::from(x) / norm).collect();
        let times = |x: &[f64], y: &dyn Fn(usize, usize) -> f64, inner: usize, out: usize| {
            let rows = x.len() / inner;
            let at = |r: usize, c: usize| (0..inner).map(|i| x[r * inner + i] * y(i, c)).sum();
            (0..rows * out)
                .map(|i| at(i / out, i % out))
                .collect::<Vec<f64>>()
        };
        for &[a, b, c] in coefficients {
            let s = times(&x, &|i, r| x[r * cols + i], cols, rows);
            let s2 = times(&s, &|i, r| s[i * rows + r], rows, rows);
            let p: Vec<f64> = s.iter().zip(&s2).map(|(s, s2)| b * s + c * s2).collect();
            let px = times(&p, &|i, r| x[i * cols + r], rows, cols);
            x.iter_mut().zip(px).for_each(|(x, px)| *x = a * *x + px);
        }
        x
    }

    #[rstest]
    #[case(NewtonSchulz::Simple, 5, 0.7)]
    #[case(NewtonSchulz::Quintic, 5, 0.4)]
    #[case(NewtonSchulz::PolarExpress, 12, 3e-2)]
    fn singular_values_become_one(
        #[case] kind: NewtonSchulz,
        #[case] steps: usize,
        #[case] error: f64,
        #[values([6, 24], [24, 6], [7, 13])] shape: [usize; 2],
    ) {
        let x = random(shape);
        let coefficients = kind.coefficients(steps);
        let found = orthogonalized(x.clone(), &coefficients, FloatDType::F32, None).unwrap();
        for (found, expected) in
            values(found.clone())
                .iter()
                .zip(by_definition(&values(x), shape, &coefficients))
        {
            assert!(
                (f64::from(*found) - expected).abs() < 2e-5,
                "{found} {expected}"
            );
        }
        let [rows, cols] = shape;
        let x = if rows > cols {
            found.transpose()
        } else {
            found
        };
        let size = rows.min(cols);
        // The eigenvalues of x xᵀ are the squares of the singular values of x.
        let gram = values(x.clone().matmul(x.transpose()));
        let trace: f32 = (0..size).map(|i| gram[i * size + i]).sum();
        let off = gram.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() - f64::from(trace);
        assert!(
            (f64::from(trace) / size as f64 - 1.0).abs() < error,
            "{trace}"
        );
        assert!(off.abs() / (size as f64) < error, "{off}");
    }

    #[test]
    fn a_zero_matrix_stays_one_and_the_size_of_one_does_not_matter() {
        let coefficients = NewtonSchulz::Quintic.coefficients(5);
        let run = |x| orthogonalized(x, &coefficients, FloatDType::F32, None).unwrap();
        assert_eq!(values(run(random([3, 5]) * 0.0)), [0.0; 15]);
        let x = random([4, 6]);
        let [small, large] =
            [x.clone() * 2f32.powi(-10), x * 2f32.powi(10)].map(|x| values(run(x)));
        assert_eq!(small, large);
    }
}
