use burn::tensor::{Tensor, activation::sigmoid};
use megaburn_autograd::backend_ops::{chunk_halves, compute_dtype, weigh};

/// [`clamped_swiglu`](crate::clamped_swiglu) by its definition.
pub fn clamped_swiglu<const D: usize>(gate_up: Tensor<D>) -> Tensor<D> {
    let dtype = gate_up.dtype();
    let [gate, up] = chunk_halves(gate_up.cast(compute_dtype(dtype)));
    let gate = gate.clamp_max(7.0);
    let up = up.clamp(-7.0, 7.0);
    (gate.clone() * sigmoid(gate * 1.702) * (up + 1.0)).cast(dtype)
}

/// [`clamped_swiglu_weighted`](crate::clamped_swiglu_weighted) by its definition.
pub fn clamped_swiglu_weighted<const D: usize>(gate_up: Tensor<D>, weight: Tensor<1>) -> Tensor<D> {
    weigh(gate_up, weight, clamped_swiglu)
}
