use burn::tensor::Tensor;
use megaburn_autograd::backend_ops::{chunk_halves, compute_dtype, weigh};

use crate::activation::reference::gelu::{gelu, gelu_tanh};

/// [`geglu`](crate::geglu) by its definition.
pub fn geglu<const D: usize>(gate_up: Tensor<D>) -> Tensor<D> {
    let dtype = gate_up.dtype();
    let [gate, up] = chunk_halves(gate_up.cast(compute_dtype(dtype)));
    (gelu(gate) * up).cast(dtype)
}

/// [`geglu_tanh`](crate::geglu_tanh) by its definition.
pub fn geglu_tanh<const D: usize>(gate_up: Tensor<D>) -> Tensor<D> {
    let dtype = gate_up.dtype();
    let [gate, up] = chunk_halves(gate_up.cast(compute_dtype(dtype)));
    (gelu_tanh(gate) * up).cast(dtype)
}

/// [`geglu_weighted`](crate::geglu_weighted) by its definition.
pub fn geglu_weighted<const D: usize>(gate_up: Tensor<D>, weight: Tensor<1>) -> Tensor<D> {
    weigh(gate_up, weight, geglu)
}

/// [`geglu_tanh_weighted`](crate::geglu_tanh_weighted) by its definition.
pub fn geglu_tanh_weighted<const D: usize>(gate_up: Tensor<D>, weight: Tensor<1>) -> Tensor<D> {
    weigh(gate_up, weight, geglu_tanh)
}
