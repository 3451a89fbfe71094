//! Optimizer operations on flat buffers: AdamW, SGD, Lion, sums of squares and scaling. On GPUs
//! each is one pass over memory, and the host does not wait for results.

mod adamw;
mod bf16_out;
mod checks;
mod gradients;
#[cfg(feature = "cuda")]
mod launch;
mod lion;
pub(crate) mod reference;
mod sgd;

use burn::tensor::Tensor;

pub use adamw::{AdamwState, AdamwStep, adamw, adamw_all, adamw_scaled};
pub use bf16_out::bf16_out_slice;
pub use gradients::{partial_sums_of_squares, scaled, total};
pub use lion::{LionState, LionStep, lion, lion_scaled};
pub use sgd::{SgdState, SgdStep, sgd, sgd_scaled};

/// Whether a tensor is on a GPU, where reading it blocks until all earlier work is done.
pub fn is_on_gpu<const D: usize>(x: &Tensor<D>) -> bool {
    #[cfg(feature = "cuda")]
    return x
        .clone()
        .inner()
        .try_into_primitive::<burn::backend::Cube>()
        .is_ok();
    #[cfg(not(feature = "cuda"))]
    {
        let _ = x;
        false
    }
}

/// A gradient factor on the device.
#[cfg(test)]
fn factor(value: f32) -> Tensor<1> {
    Tensor::from_floats([value], &megaburn_autograd::testing::device())
}
