//! Attention as one fused operation of the device, where there is one.

use burn::backend::Backend;
use burn::backend::tensor::FloatTensor;

use super::AttentionOptions;

/// What is saved for backward.
#[derive(Clone, Debug)]
#[cfg_attr(
    not(feature = "cuda"),
    expect(dead_code, reason = "only GPUs have a fused attention")
)]
pub(super) struct Saved<T> {
    /// `[s_q, b, hq, d]`.
    pub(super) q: T,
    /// `[s_k, b, hkv, d]`.
    pub(super) k: T,
    /// `[s_k, b, hkv, d_v]`.
    pub(super) v: T,
    /// `[s_q, b, hq, d_v]`.
    pub(super) out: T,
    /// The LSE, `[b, hq, s_q]` in f32.
    pub(super) lse: T,
    pub(super) options: AttentionOptions,
}

pub(super) trait Fused: Backend {
    /// Computes the result, `[s_q, b, hq, d_v]`, as part of [`Saved`]; `None` if the device does
    /// not support it.
    fn fused(
        q: &FloatTensor<Self>,
        k: &FloatTensor<Self>,
        v: &FloatTensor<Self>,
        options: &AttentionOptions,
    ) -> Option<Saved<FloatTensor<Self>>>;

    /// The gradients of `q`, `k` and `v`, from the gradient of the result.
    fn fused_gradients(
        saved: Saved<FloatTensor<Self>>,
        dout: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 3];
}

#[cfg(feature = "flex")]
impl Fused for burn::backend::Flex {
    fn fused(
        _: &FloatTensor<Self>,
        _: &FloatTensor<Self>,
        _: &FloatTensor<Self>,
        _: &AttentionOptions,
    ) -> Option<Saved<FloatTensor<Self>>> {
        None
    }

    fn fused_gradients(
        _: Saved<FloatTensor<Self>>,
        _: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 3] {
        unreachable!("the forward pass saved nothing")
    }
}

#[cfg(feature = "cuda")]
mod cube {
    use burn::backend::Cube;
    use megaburn_cuda::tensor::{from_backend, into_backend};

    use super::*;
    use crate::attention::{cudnn, flash};

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
}
