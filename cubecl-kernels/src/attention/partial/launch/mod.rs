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
fn taken(
    inputs: [CubeTensor; 3],
    biased: bool,
    options: &AttentionOptions,
) -> Option<[CubeTensor; 3]> {
    flash::takes(&inputs, biased, options).then(|| inputs.map(flash::readable))
}

/// A bias as the kernels read it.
fn lines(bias: &Tensor<2>) -> Option<CubeTensor> {
    on_gpu(&bias.clone().cast(DType::F32)).map(tensor::contiguous)
}

fn all_on_gpu([q, k, v]: &[Tensor<4>; 3]) -> Option<[CubeTensor; 3]> {
    Some([on_gpu(q)?, on_gpu(k)?, on_gpu(v)?])
}

pub(super) fn forward(
    inputs: &[Tensor<4>; 3],
    bias: Option<&Tensor<2>>,
    options: &AttentionOptions,
) -> Option<PartialAttention> {
    let inputs = all_on_gpu(inputs)?;
    let biased = bias.is_some();
    if let Some([.., out, lse]) = cudnn::forward(&inputs, biased, options) {
        return Some(PartialAttention {
            out: wrap(out),
            lse: wrap(lse),
        });
    }
    let inputs = taken(inputs, biased, options)?;
    let line = bias.and_then(lines);
    let (out, lse) = flash::forward(inputs.each_ref(), line.as_ref(), options);
    Some(PartialAttention {
        out: wrap(out),
        lse: wrap(lse),
    })
}

pub(super) fn backward(
    inputs: &[Tensor<4>; 3],
    bias: Option<&Tensor<2>>,
    whole: &PartialAttention,
    dout: &Tensor<4>,
    options: &AttentionOptions,
) -> Option<([Tensor<4>; 3], Option<Tensor<2>>)> {
    let dtype = inputs[0].dtype();
    let inputs = all_on_gpu(inputs)?.map(flash::readable);
    let PartialAttention { out, lse } = whole.clone();
    let of_queries = |x: Tensor<4>| on_gpu(&x.cast(dtype)).map(tensor::contiguous);
    let out = of_queries(out)?;
    let dout = of_queries(dout.clone())?;
    let lse = tensor::contiguous(on_gpu(&lse.cast(DType::F32))?);
    let biased = bias.is_some();
    let by_cudnn = cudnn::backward(inputs.each_ref(), [&out, &lse], &dout, biased, options);
    if let Some(found) = by_cudnn {
        return Some((found.map(wrap), None));
    }
    let inputs = taken(inputs, biased, options)?;
    let line = bias.and_then(lines);
    let saved = [out, lse];
    let (found, of_bias) = flash::backward(inputs.each_ref(), line.as_ref(), saved, dout, options);
    let of_bias = of_bias.map(wrap::<2>).zip(bias);
    let of_bias = of_bias.map(|(found, bias)| found.cast(bias.dtype()));
    Some((found.map(wrap), of_bias))
}
