//! Optimizer operations on flat buffers: AdamW, SGD, Lion, sums of squares and scaling. On GPUs
//! each is one pass over memory, and the host does not wait for results.

mod adamw;
mod bf16_out;
mod checks;
mod fp8_moment;
mod gradients;
#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "cuda")]
mod launch;
mod lion;
mod options;
pub(crate) mod reference;
mod remainder;
mod sgd;

pub use adamw::{adamw, adamw_all, adamw_all_observed, adamw_scaled};
pub use bf16_out::bf16_out_slice;
pub use fp8_moment::{FP8_MOMENT_BLOCK, Fp8Moment, packed_moment, unpacked_moment};
pub use gradients::{partial_sums_of_squares, scaled, total};
pub use lion::{lion, lion_scaled};
pub use options::{AdamwState, AdamwStep, LionState, LionStep, SgdState, SgdStep};
pub use remainder::{joined_master, master_remainder};
pub use sgd::{sgd, sgd_scaled};

/// A gradient factor on the device.
#[cfg(test)]
fn factor(value: f32) -> burn::tensor::Tensor<1> {
    burn::tensor::Tensor::from_floats([value], &megaburn_autograd::testing::device())
}
