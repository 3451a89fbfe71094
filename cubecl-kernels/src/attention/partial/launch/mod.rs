//! Partial attention by [`cudnn`], where that is chosen and supported, or by the kernels of
//! [`flash`].

pub(super) mod merge;

use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;
use megaburn_cuda::tensor;

use super::partial_attention::PartialAttention;
use crate::attention::launch::{cudnn, flash};
use crate::attention::options::AttentionOptions;
use crate::kernel_parts::{on_gpu, wrap};

/// The inputs as the kernels read them; `None` if the kernels do not support them.
fn taken(inputs: [CubeTensor; 3], options: &AttentionOptions) -> Option<[CubeTensor; 3]> {
    flash::takes(&inputs, options).then(|| inputs.map(flash::readable))
}

fn all_on_gpu([q, k, v]: &[Tensor<4>; 3]) -> Option<[CubeTensor; 3]> {
    Some([on_gpu(q)?, on_gpu(k)?, on_gpu(v)?])
}

pub(super) fn forward(
    inputs: &[Tensor<4>; 3],
    options: &AttentionOptions,
) -> Option<PartialAttention> {
    let inputs = all_on_gpu(inputs)?;
    if let Some([.., out, lse]) = cudnn::forward(&inputs, options) {
        return Some(PartialAttention {
            out: wrap(out),
            lse: wrap(lse),
        });
    }
    let inputs = taken(inputs, options)?;
    let (out, lse) = flash::forward(inputs.each_ref(), options);
    Some(PartialAttention {
        out: wrap(out),
        lse: wrap(lse),
    })
}

pub(super) fn backward(
    inputs: &[Tensor<4>; 3],
    whole: &PartialAttention,
    dout: &Tensor<4>,
    options: &AttentionOptions,
) -> Option<[Tensor<4>; 3]> {
    let dtype = inputs[0].dtype();
    let inputs = all_on_gpu(inputs)?.map(flash::readable);
    let PartialAttention { out, lse } = whole.clone();
    let of_queries = |x: Tensor<4>| on_gpu(&x.cast(dtype)).map(tensor::contiguous);
    let out = of_queries(out)?;
    let dout = of_queries(dout.clone())?;
    let lse = tensor::contiguous(on_gpu(&lse.cast(DType::F32))?);
    let by_cudnn = cudnn::backward(inputs.each_ref(), [&out, &lse], &dout, options);
    if let Some(gradients) = by_cudnn {
        return Some(gradients.map(wrap));
    }
    let inputs = taken(inputs, options)?;
    Some(flash::backward(inputs.each_ref(), out, lse, dout, options).map(wrap))
}
