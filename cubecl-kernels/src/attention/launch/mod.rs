//! Attention on CubeCL GPU backends: by cuDNN where that is chosen and supported, otherwise by the
//! kernels of [`flash`].

pub(super) mod cudnn;
pub(super) mod flash;
mod scores;

use burn::backend::Cube;
use burn::backend::tensor::FloatTensor;
use megaburn_cuda::tensor::{from_backend, into_backend};

use super::fused::{Fused, Saved};
use super::options::AttentionOptions;

impl Fused for Cube {
    fn fused(
        q: &FloatTensor<Self>,
        k: &FloatTensor<Self>,
        v: &FloatTensor<Self>,
        options: &AttentionOptions,
    ) -> Option<Saved<FloatTensor<Self>>> {
        let inputs = [q, k, v].map(|x| from_backend(x.clone()));
        if let Some(saved) = cudnn::forward(&inputs, options) {
            let [q, k, v, out, lse] = saved.map(into_backend);
            return Some(Saved {
                q,
                k,
                v,
                out,
                lse,
                options: options.clone(),
            });
        }
        if !flash::takes(&inputs, options) {
            return None;
        }
        let [q, k, v] = inputs.map(flash::readable);
        let (out, lse) = flash::forward([&q, &k, &v], options);
        let [q, k, v, out, lse] = [q, k, v, out, lse].map(into_backend);
        Some(Saved {
            q,
            k,
            v,
            out,
            lse,
            options: options.clone(),
        })
    }

    fn fused_gradients(
        saved: Saved<FloatTensor<Self>>,
        dout: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 3] {
        let Saved {
            q,
            k,
            v,
            out,
            lse,
            options,
        } = saved;
        let [q, k, v, out, lse, dout] = [q, k, v, out, lse, dout].map(from_backend);
        if let Some(gradients) = cudnn::backward([&q, &k, &v], [&out, &lse], &dout, &options) {
            return gradients.map(into_backend);
        }
        flash::backward([&q, &k, &v], out, lse, dout, &options).map(into_backend)
    }
}
