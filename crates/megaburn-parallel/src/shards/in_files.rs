use burn::{module::Param, tensor::Tensor};

/// Whether files have the transposed matrix: Burn's mappings of a parameter for files transpose it, as
/// those of a linear layer with `LinearLayout::Col` do, whose files are `[d_output, d_input]`.
pub fn is_transposed_in_files<const D: usize>(param: &Param<Tensor<D>>) -> bool {
    if D != 2 {
        return false;
    }
    // A matrix that is not square shows what the mapping for reading does. The parameter is not drawn.
    let mut shape = [1; D];
    shape[D - 1] = 2;
    let read = Tensor::zeros(shape, &param.lazy_device());
    let mapped = param.clone().transform_for_load(read, param.id);
    mapped.val().dims() != shape
}

/// The shape of a parameter's value, which is not drawn for it. Until it is drawn, Burn says the
/// shape that files have.
pub(super) fn value_shape<const D: usize>(param: &Param<Tensor<D>>) -> Vec<usize> {
    let mut shape = param.lazy_shape().to_vec();
    if !param.is_initialized() && is_transposed_in_files(param) {
        shape.reverse();
    }
    shape
}
