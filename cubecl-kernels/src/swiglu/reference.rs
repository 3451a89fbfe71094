use burn::tensor::{Tensor, activation::sigmoid};

use crate::primitive::compute_dtype;

/// [`swiglu`](crate::swiglu) by its definition.
pub fn swiglu<const D: usize>(gate_up: Tensor<D>) -> Tensor<D> {
    let dtype = gate_up.dtype();
    let [gate, up]: [Tensor<D>; 2] = gate_up
        .cast(compute_dtype(dtype))
        .chunk(2, D - 1)
        .try_into()
        .expect("an even dimension has two halves");
    (gate.clone() * sigmoid(gate) * up).cast(dtype)
}
