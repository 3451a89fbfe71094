use burn::tensor::{Tensor, activation::sigmoid};
use megaburn_autograd::backend_ops::{chunk_halves, compute_dtype, weigh};

/// [`swiglu`](crate::swiglu) by its definition.
pub fn swiglu<const D: usize>(gate_up: Tensor<D>) -> Tensor<D> {
    let dtype = gate_up.dtype();
    let [gate, up] = chunk_halves(gate_up.cast(compute_dtype(dtype)));
    (gate.clone() * sigmoid(gate) * up).cast(dtype)
}

/// [`swiglu_weighted`](crate::swiglu_weighted) by its definition.
pub fn swiglu_weighted<const D: usize>(gate_up: Tensor<D>, weight: Tensor<1>) -> Tensor<D> {
    weigh(gate_up, weight, swiglu)
}
