use burn::tensor::Tensor;

/// [`split_last`](crate::split_last) by its definition: one slice after the other.
pub(super) fn split_last<const D: usize, const N: usize>(
    x: Tensor<D>,
    sizes: [usize; N],
) -> [Tensor<D>; N] {
    std::array::from_fn(|i| {
        let start = sizes[..i].iter().sum();
        x.clone().narrow(D - 1, start, sizes[i])
    })
}
