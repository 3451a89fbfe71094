//! The common implementation of RMS norm and layer norm: one operation with options, composed of
//! primitives on CPUs and fused kernels on GPUs.

mod fallback;
#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "cuda")]
mod launch;
pub(crate) mod layer_norm;
mod op;
mod options;
pub(crate) mod reference;
pub(crate) mod rms_norm;
#[cfg(test)]
mod tests;

use burn::tensor::Tensor;
use megaburn_autograd::arg_check::{self, float};

use op::NormCall;
pub use options::{NormAmaxes, NormGrads, NormOptions};

/// Panics unless rows of `x` can be normalized with these vectors and options.
fn check<const D: usize>(
    op: &str,
    x: &Tensor<D>,
    gamma: &Tensor<1>,
    beta: Option<&Tensor<1>>,
    NormCall { norm, sums, .. }: &NormCall,
) {
    let epsilon = norm.options.epsilon;
    let vectors = [("gamma", Some(gamma)), ("beta", beta)];
    let vectors = vectors
        .into_iter()
        .filter_map(|(name, vector)| Some((name, vector?)));
    let others = vectors.clone().map(|(name, vector)| float(name, vector));
    arg_check::check(op, [float("x", x)].into_iter().chain(others));
    let n = x.dims()[D - 1];
    assert!(n > 0, "{op}: x is {:?}, its rows are empty", x.dims());
    for (name, vector) in vectors {
        let [length] = vector.dims();
        assert_eq!(
            n, length,
            "{op}: {name} has {length} elements, but rows have {n}"
        );
    }
    for main_grad in [&sums.gamma, &sums.beta].into_iter().flatten() {
        main_grad.check(op, [1, n]);
    }
    assert!(
        epsilon >= 0.0 && epsilon.is_finite(),
        "{op}: epsilon {epsilon} is not a finite number of at least 0"
    );
}
