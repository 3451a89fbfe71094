//! Parts by [`cudnn`], where that is chosen and can, and by the kernels of [`flash`].

use burn::backend::Cube;
use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;
use megaburn_cuda::tensor;

use super::AttentionPart;
use crate::attention::{AttentionOptions, cudnn, flash};

pub(super) fn cube<const D: usize>(x: &Tensor<D>) -> Option<CubeTensor> {
    x.clone().try_into_primitive::<Cube>().ok().map(tensor::from_backend)
}

pub(super) fn wrap<const D: usize>(x: CubeTensor) -> Tensor<D> {
    Tensor::from_primitive::<Cube>(tensor::into_backend(x))
}

/// The inputs as the kernels read them, if they can.
fn taken(inputs: [CubeTensor; 3], options: &AttentionOptions) -> Option<[CubeTensor; 3]> {
    flash::takes(&inputs, options).then(|| inputs.map(flash::readable))
}

fn on_gpu([q, k, v]: &[Tensor<4>; 3]) -> Option<[CubeTensor; 3]> {
    Some([cube(q)?, cube(k)?, cube(v)?])
}

pub(super) fn forward(
    inputs: &[Tensor<4>; 3],
    options: &AttentionOptions,
) -> Option<AttentionPart> {
    let inputs = on_gpu(inputs)?;
    if let Some([.., out, lse]) = cudnn::forward(&inputs, options) {
        return Some(AttentionPart { out: wrap(out), lse: wrap(lse) });
    }
    let inputs = taken(inputs, options)?;
    let (out, lse) = flash::forward(inputs.each_ref(), options);
    Some(AttentionPart { out: wrap(out), lse: wrap(lse) })
}

pub(super) fn backward(
    inputs: &[Tensor<4>; 3],
    whole: &AttentionPart,
    dout: &Tensor<4>,
    options: &AttentionOptions,
) -> Option<[Tensor<4>; 3]> {
    let dtype = inputs[0].dtype();
    let inputs = on_gpu(inputs)?.map(flash::readable);
    let AttentionPart { out, lse } = whole.clone();
    let of_queries = |x: Tensor<4>| cube(&x.cast(dtype)).map(tensor::contiguous);
    let (out, dout) = (of_queries(out)?, of_queries(dout.clone())?);
    let lse = tensor::contiguous(cube(&lse.cast(DType::F32))?);
    let by_cudnn = cudnn::backward(inputs.each_ref(), [&out, &lse], &dout, options);
    if let Some(gradients) = by_cudnn {
        return Some(gradients.map(wrap));
    }
    let inputs = taken(inputs, options)?;
    Some(flash::backward(inputs.each_ref(), out, lse, dout, options).map(wrap))
}
