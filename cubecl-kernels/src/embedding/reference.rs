use burn::tensor::{Int, Tensor, module};
use megaburn_autograd::backend_ops::compute_dtype;

use super::options::EmbeddingOptions;

/// [`embedding`](crate::embedding) by its definition.
pub fn embedding(table: Tensor<2>, ids: Tensor<2, Int>, options: EmbeddingOptions) -> Tensor<3> {
    let dtype = table.dtype();
    let rows = table.dims()[0] as i64;
    let table = table.cast(compute_dtype(dtype));
    let Some(first) = options.first else {
        return module::embedding(table, ids).cast(dtype);
    };
    let local = ids - first as i64;
    let outside = local
        .clone()
        .lower_elem(0)
        .bool_or(local.clone().greater_equal_elem(rows));
    let vectors = module::embedding(table, local.mask_fill(outside.clone(), 0));
    let outside = outside.unsqueeze_dim::<3>(2).expand(vectors.dims());
    vectors.mask_fill(outside, 0.0).cast(dtype)
}
