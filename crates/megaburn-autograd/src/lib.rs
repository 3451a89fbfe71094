//! What handwritten operations need of Burn's autodiff. Operations themselves are elsewhere, in
//! `megaburn-kernels` and `megaburn-collective`.
//!
//! | module | what it is for |
//! |---|---|
//! | `fused_op` | operations with a handwritten backward pass |
//! | `multi_output` | the same, with several differentiable results |
//! | `backward_from` | starting a backward pass from a given output gradient |
//! | `detached_output` | the end of a pipeline stage's graph, whose gradient comes from another rank |
//! | `checkpoint_operands` | the operands of a function that backward recomputes in a graph of its own |
//! | `observed` | the gradient of a tensor inside a graph, for a comparison |
//! | `main_grad` | f32 sums of weight gradients outside of Burn's `Gradients`, with hooks; weights from a source |
//! | `bucket_slice` | main gradients in slices of a larger buffer |
//! | `wgrad_queue` | weight gradients that a backward pass leaves for later |
//! | `overlapped_wgrads` | weight gradients that wait for a send to overlap with |
//! | `recompute_fn` | inputs of matrix products that backward recomputes instead of saving them |
//! | [`arg_check`] | dtype and device checks of operands |
//! | [`backend_ops`] | small steps on a backend's own tensors |
//! | `into_primitive` | conversions between a backend's tensors and Burn's |
//!
//! ```
//! use burn::tensor::{Device, Tensor, activation::tanh};
//! use megaburn_autograd::{CheckpointOperands, DetachedOutput};
//!
//! // The activations of `tanh` are not saved, but recomputed in backward.
//! let x = Tensor::<3>::ones([2, 1, 3], &Device::flex().autodiff()).require_grad();
//! let source = x.clone().inner();
//! let y = Tensor::from_inner(tanh(source.clone()));
//! let mut function = CheckpointOperands::new(&x.device());
//! function.add(x.clone());
//! let [y] = function.results([y], move |[dy]| {
//!     let x = Tensor::from_inner(source).require_grad();
//!     let y = DetachedOutput::of(tanh(x.clone()));
//!     let mut grads = y.backward(dy.expect("the only result has a gradient"));
//!     vec![x.grad_remove(&mut grads).map(|dx| dx.flatten(0, 1))]
//! });
//! let expected = 1.0 - 1f32.tanh().powi(2);
//! let dx = x.grad(&y.sum().backward()).unwrap().into_data();
//! assert!(dx.iter::<f32>().all(|dx| (dx - expected).abs() < 1e-6));
//! ```

// Errors are values; the panics that remain are documented.
#![deny(clippy::unwrap_used, clippy::panic)]
// Burn has deprecated NdArray, and still has it.
#![cfg_attr(feature = "ndarray", allow(deprecated))]

pub mod arg_check;
pub mod backend_ops;
mod backends;
mod backward_from;
mod bucket_slice;
mod checkpoint_operands;
mod detached_output;
mod fused_op;
mod into_primitive;
mod main_grad;
mod multi_output;
mod observed;
mod overlapped_wgrads;
mod recompute_fn;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod wgrad_queue;

pub use backward_from::backward_from;
pub use bucket_slice::{bucket_slice, is_view_of};
pub use checkpoint_operands::CheckpointOperands;
pub use detached_output::DetachedOutput;
#[cfg(feature = "cuda")]
pub use fused_op::fused_on_gpu;
pub use fused_op::{FusedOp, InputGrads, OnEveryBackend, fused, optional, with_autodiff_of};
pub use into_primitive::IntoPrimitive;
pub use main_grad::{AccumTarget, LinearPass, MainGrad, read_weight};
pub use multi_output::{MultiOutputOnEveryBackend, MultiOutputOp, fused_outputs};
pub use observed::{FoundGradient, observed};
pub use overlapped_wgrads::OverlappedWgrads;
pub use recompute_fn::{RecomputeFn, SavedInput};
pub use wgrad_queue::{WgradQueue, run_or_defer, without_deferral};
