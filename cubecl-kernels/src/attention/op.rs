//! Attention on a backend's primitives, block of queries by block of queries, with its backward.
//!
//! A block leaves out the keys that none of its queries sees: of a causal square, nearly half.

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata, backend_extension};
use burn::tensor::{DType, Shape};

use super::AttentionOptions;
use super::block::{self, Block, accumulate, by_head, by_position};
use super::fused::{self, Fused};
use super::scores::Scores;
use crate::backends::on_every_backend;
use crate::primitive::{cast, compute_dtype};
use crate::products::Products;

#[backend_extension(Cube: cfg(feature = "cuda"), Flex: cfg(feature = "flex"), Autodiff)]
pub(crate) trait AttentionOps: Backend {
    /// `q: [s_q, b, hq, d]`, `k: [s_k, b, hkv, d]`, `v: [s_k, b, hkv, d_v]` to
    /// `[s_q, b, hq * d_v]`. (`attention` is taken by Burn's `ModuleOps`.)
    fn grouped_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        options: AttentionOptions,
    ) -> FloatTensor<Self>;
}

on_every_backend! {
    impl AttentionOps {
        fn grouped_attention(
            q: FloatTensor<Self>,
            k: FloatTensor<Self>,
            v: FloatTensor<Self>,
            options: AttentionOptions,
        ) -> FloatTensor<Self> {
            attend::<Self>(q, k, v, &options).0
        }
    }
}

/// What the backward reads.
#[derive(Clone, Debug)]
enum Saved<T> {
    Fused(fused::Saved<T>),
    Composed(Composed<T>),
}

#[derive(Clone, Debug)]
struct Composed<T> {
    blocks: Vec<Block<T>>,
    /// `[b, hkv, s_k, d]`.
    k: T,
    /// `[b, hkv, s_k, d_v]`.
    v: T,
    scale: f64,
    dtypes: [DType; 3],
}

fn attend<B: Products + Scores + Fused>(
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    options: &AttentionOptions,
) -> (FloatTensor<B>, Saved<FloatTensor<B>>) {
    if let Some(saved) = B::fused(&q, &k, &v, options) {
        let [s_q, b, hq, d_v] = saved.out.shape().dims();
        let y = B::float_reshape(saved.out.clone(), Shape::from([s_q, b, hq * d_v]));
        return (y, Saved::Fused(saved));
    }
    let (y, saved) = composed::<B>(q, k, v, options);
    (y, Saved::Composed(saved))
}

fn composed<B: Products + Scores>(
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    options: &AttentionOptions,
) -> (FloatTensor<B>, Composed<FloatTensor<B>>) {
    let dtypes = [q.dtype(), k.dtype(), v.dtype()];
    let common = match dtypes.iter().all(|&dtype| dtype == dtypes[0]) {
        true => dtypes[0].into(),
        false => compute_dtype(dtypes[0]),
    };
    let [q, k, v] = [q, k, v].map(|x| cast::<B>(x, common));
    let [s_q, b, hq, d] = q.shape().dims();
    let (k, v) = (by_head::<B>(k), by_head::<B>(v));
    let (outputs, blocks) = options
        .blocks(s_q)
        .map(|queries| block::forward::<B>(q.clone(), queries, k.clone(), v.clone(), options))
        .unzip();
    let y = cast::<B>(B::float_cat(outputs, 0), dtypes[0].into());
    let y = B::float_reshape(y, Shape::from([s_q, b, hq * v.shape()[3]]));
    (y, Composed { blocks, k, v, scale: options.factor(d), dtypes })
}

#[derive(Debug)]
struct AttentionBackward;

impl<B: AttentionOps + Products + Scores + Fused> Backward<B, 3> for AttentionBackward {
    type State = Saved<FloatTensor<B>>;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let gradients = match ops.state {
            Saved::Fused(saved) => {
                let dy = cast::<B>(dy, saved.out.dtype().into());
                let dout = B::float_reshape(dy, saved.out.shape());
                B::fused_gradients(saved, dout).map(Some)
            }
            Saved::Composed(saved) => composed_gradients::<B>(saved, dy),
        };
        for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
            if let (Some(node), Some(gradient)) = (parent, gradient) {
                grads.register::<B>(node.id, gradient);
            }
        }
    }
}

/// The gradients of `q`, `k` and `v`.
fn composed_gradients<B: Products + Scores>(
    saved: Composed<FloatTensor<B>>,
    dy: FloatTensor<B>,
) -> [Option<FloatTensor<B>>; 3] {
    let Composed { blocks, k, v, scale, dtypes } = saved;
    let dy = cast::<B>(dy, k.dtype().into());
    let s_k = k.shape()[2];
    let (mut dq, mut dk, mut dv) = (Vec::with_capacity(blocks.len()), None, None);
    // From the last block, which sees the most keys: its share often is the first total whole.
    for block in blocks.into_iter().rev() {
        let part = block::backward::<B>(block, dy.clone(), k.clone(), v.clone(), scale);
        dq.push(part.q);
        dk = Some(accumulate::<B>(dk, part.k, &part.keys, s_k));
        dv = Some(accumulate::<B>(dv, part.v, &part.keys, s_k));
    }
    dq.reverse();
    let gradients = [Some(B::float_cat(dq, 0)), dk.map(by_position::<B>), dv.map(by_position::<B>)];
    let mut dtypes = dtypes.into_iter();
    gradients.map(|gradient| {
        let dtype = dtypes.next().expect("one for each").into();
        gradient.map(|gradient| cast::<B>(gradient, dtype))
    })
}

impl<B: AttentionOps + Products + Scores + Fused, C: CheckpointStrategy> AttentionOps
    for Autodiff<B, C>
{
    fn grouped_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        options: AttentionOptions,
    ) -> FloatTensor<Self> {
        let ((q, for_q), (k, for_k)) = (q.into_parts(), k.into_parts());
        let (v, for_v) = v.into_parts();
        match AttentionBackward.prepare::<C>([for_q, for_k, for_v]).compute_bound().stateful() {
            OpsKind::Tracked(op) => {
                let (y, saved) = attend::<B>(q, k, v, &options);
                op.finish(saved, y)
            }
            OpsKind::UnTracked(op) => op.finish(B::grouped_attention(q, k, v, options)),
        }
    }
}
