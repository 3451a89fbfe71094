//! Attention on CubeCL GPU backends: by cuDNN where that is chosen and supported, otherwise by the
//! kernels of [`flash`].

pub(super) mod cudnn;
pub(super) mod flash;
mod scores;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::FloatDType;
use burn_cubecl::tensor::CubeTensor;
use megaburn_autograd::backend_ops::cast;
use megaburn_cuda::tensor::{contiguous, from_backend, into_backend};

use super::fused::{Fused, FusedGradients, Saved};
use super::options::AttentionOptions;

impl Fused for Cube {
    fn fused(
        q: &FloatTensor<Self>,
        k: &FloatTensor<Self>,
        v: &FloatTensor<Self>,
        bias: Option<&FloatTensor<Self>>,
        options: &AttentionOptions,
    ) -> Option<Saved<FloatTensor<Self>>> {
        let inputs = [q, k, v].map(|x| from_backend(x.clone()));
        let biased = bias.is_some();
        if let Some(saved) = cudnn::forward(&inputs, biased, options) {
            let [q, k, v, out, lse] = saved.map(into_backend);
            return Some(Saved {
                q,
                k,
                v,
                bias: None,
                out,
                lse,
                options: options.clone(),
            });
        }
        if !flash::takes(&inputs, biased, options) {
            return None;
        }
        let [q, k, v] = inputs.map(flash::readable);
        let line = bias.cloned().map(lines);
        let (out, lse) = flash::forward([&q, &k, &v], line.as_ref(), options);
        let [q, k, v, out, lse] = [q, k, v, out, lse].map(into_backend);
        Some(Saved {
            q,
            k,
            v,
            bias: bias.cloned(),
            out,
            lse,
            options: options.clone(),
        })
    }

    fn fused_gradients(
        saved: Saved<FloatTensor<Self>>,
        dout: FloatTensor<Self>,
    ) -> FusedGradients<Self> {
        let Saved {
            q,
            k,
            v,
            bias,
            out,
            lse,
            options,
        } = saved;
        let [q, k, v, out, lse, dout] = [q, k, v, out, lse, dout].map(from_backend);
        let inputs = [&q, &k, &v];
        let by_cudnn = cudnn::backward(inputs, [&out, &lse], &dout, bias.is_some(), &options);
        if let Some(gradients) = by_cudnn {
            return (gradients.map(into_backend), None);
        }
        let line = bias.clone().map(lines);
        let (gradients, of_bias) =
            flash::backward(inputs, line.as_ref(), [out, lse], dout, &options);
        let of_bias = of_bias.map(into_backend).zip(bias);
        let of_bias = of_bias.map(|(found, bias)| cast::<Self>(found, bias.dtype().into()));
        (gradients.map(into_backend), of_bias)
    }
}

/// A bias as the kernels read it.
pub(super) fn lines(bias: FloatTensor<Cube>) -> CubeTensor {
    contiguous(from_backend(cast::<Cube>(bias, FloatDType::F32)))
}
