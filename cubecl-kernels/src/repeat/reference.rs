use burn::tensor::Tensor;

/// [`repeat_heads`](crate::repeat_heads) by its definition.
pub fn repeat_heads(x: Tensor<4>, heads: usize) -> Tensor<4> {
    let [s, b, _, d] = x.dims();
    x.expand([s, b, heads, d])
}
