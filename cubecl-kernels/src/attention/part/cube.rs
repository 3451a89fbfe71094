//! Parts by the kernels of [`flash`].

use burn::backend::Cube;
use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;
use megaburn_cuda::tensor;

use super::AttentionPart;
use crate::attention::{AttentionOptions, flash};

fn cube<const D: usize>(x: &Tensor<D>) -> Option<CubeTensor> {
    x.clone().try_into_primitive::<Cube>().ok().map(tensor::from_backend)
}

fn wrap<const D: usize>(x: CubeTensor) -> Tensor<D> {
    Tensor::from_primitive::<Cube>(tensor::into_backend(x))
}

/// The inputs, if the kernels can.
fn taken(inputs: &[Tensor<4>; 3], options: &AttentionOptions) -> Option<[CubeTensor; 3]> {
    let [q, k, v] = inputs;
    let inputs = [cube(q)?, cube(k)?, cube(v)?];
    flash::takes(&inputs, options).then(|| inputs.map(flash::readable))
}

pub(super) fn forward(
    inputs: &[Tensor<4>; 3],
    options: &AttentionOptions,
) -> Option<AttentionPart> {
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
    let inputs = taken(inputs, options)?;
    let AttentionPart { out, lse } = whole.clone();
    let [out, dout] = [out, dout.clone()].map(|x| cube(&x.cast(dtype)).map(tensor::contiguous));
    let lse = tensor::contiguous(cube(&lse.cast(DType::F32))?);
    Some(flash::backward(inputs.each_ref(), out?, lse, dout?, options).map(wrap))
}
