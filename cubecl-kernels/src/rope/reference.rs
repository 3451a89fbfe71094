use burn::tensor::Tensor;

use super::RopeTable;
use crate::primitive::compute_dtype;

/// [`apply_rope`](crate::apply_rope) by its definition: `x * cos + rotate_half(x) * sin`.
pub fn apply_rope(x: Tensor<4>, table: &RopeTable) -> Tensor<4> {
    let [s, _, _, d] = x.dims();
    let (dtype, wide) = (x.dtype(), compute_dtype(x.dtype()));
    let full = |half: &Tensor<2>| {
        let full = Tensor::cat(vec![half.clone(), half.clone()], 1);
        let full = full.cast(wide).reshape([s, 1, 1, d]);
        if x.device().is_autodiff() { Tensor::from_inner(full) } else { full }
    };
    let (cos, sin) = (full(table.cos()), full(table.sin()));
    let x = x.cast(wide);
    let (first, second) = (x.clone().narrow(3, 0, d / 2), x.clone().narrow(3, d / 2, d / 2));
    (x * cos + Tensor::cat(vec![-second, first], 3) * sin).cast(dtype)
}
