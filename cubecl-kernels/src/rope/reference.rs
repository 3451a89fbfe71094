use burn::tensor::Tensor;
use megaburn_autograd::backend_ops::compute_dtype;

use super::table::{RopeLayout, RopeTable};

/// [`apply_rope`](crate::apply_rope) by its definition: `x * cos + turned(x) * sin`, where `turned`
/// rotates each pair by a quarter turn.
pub fn apply_rope(x: Tensor<4>, table: &RopeTable) -> Tensor<4> {
    let [s, b, h, d] = x.dims();
    let (dtype, wide) = (x.dtype(), compute_dtype(x.dtype()));
    let [_, each, half] = table.cos().dims();
    // Pairs are `[s, b, h, d / 2, 2]` for neighbors, and `[s, b, h, 2, d / 2]` for halves.
    let (dim, shape) = match table.layout() {
        RopeLayout::Halves => (3, [s, b, h, 2, half]),
        RopeLayout::Interleaved => (4, [s, b, h, half, 2]),
    };
    let for_pairs = |t: &Tensor<3>| {
        let t = t
            .clone()
            .cast(wide)
            .reshape([s, each, 1, half])
            .unsqueeze_dim::<5>(dim);
        if x.device().is_autodiff() {
            Tensor::from_inner(t)
        } else {
            t
        }
    };
    let cos = for_pairs(table.cos());
    let sin = for_pairs(table.sin());
    let pairs = x.clone().narrow(3, 0, 2 * half).cast(wide).reshape(shape);
    let first = pairs.clone().narrow(dim, 0, 1);
    let second = pairs.clone().narrow(dim, 1, 1);
    let turned = Tensor::cat(vec![-second, first], dim);
    let rotated = (pairs * cos + turned * sin)
        .cast(dtype)
        .reshape([s, b, h, 2 * half]);
    match d - 2 * half {
        0 => rotated,
        rest => Tensor::cat(vec![rotated, x.narrow(3, 2 * half, rest)], 3),
    }
}
