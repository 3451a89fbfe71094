//! Context parallelism that all-gathers keys and values, so that every rank holds all of them.
//!
//! Source: Grattafiori et al. (2024), "The Llama 3 Herd of Models", section 3.3.2.

use burn::tensor::Tensor;
use megaburn_collective::{Group, Lane, ReduceOp, tensors};
use megaburn_kernels::{OnlineSoftmaxMerge, PartialAttention};
use megaburn_mesh::Zigzag;

use super::{
    Mask,
    order::{Order, Span},
    part_attention::{GradientSum, attend, gradients},
    parts::with_all_keys,
    unwrap_collective,
};

fn sequence_chunk(group: &Group) -> Zigzag {
    Zigzag::new(group.rank(), group.size())
}

/// Gathers keys and values from this rank's chunks into full sequences.
fn gathered(kv: [Tensor<4>; 2], order: &Order, group: &Group) -> [Tensor<4>; 2] {
    kv.map(|x| {
        let x = unwrap_collective(tensors::all_gather(x, group, Lane::InOrder));
        order.to_sequence(x.wait())
    })
}

/// See [`ring::forward`](super::ring::forward).
pub(super) fn forward([q, k, v]: [Tensor<4>; 3], mask: &Mask, group: &Group) -> PartialAttention {
    let [len, b, hq, _] = q.dims();
    let [.., d_v] = v.dims();
    let dtype = q.dtype();
    let order = mask.order(Span::of_all(group.size()), [len, b], &q.device());
    let [k, v] = gathered([k, v], &order, group);
    let mut sum = OnlineSoftmaxMerge::new([len, b, hq, d_v]);
    for part in with_all_keys(mask, sequence_chunk(group), len) {
        let found = attend(&part, [&q, &k, &v], mask.recorder.as_ref());
        sum.add(part.queries.start, found);
    }
    sum.finish(dtype)
}

/// See [`ring::backward`](super::ring::backward). Keys and values are gathered a second time.
pub(super) fn backward(
    [q, k, v]: [Tensor<4>; 3],
    whole: &PartialAttention,
    dout: Tensor<4>,
    mask: &Mask,
    group: &Group,
) -> [Tensor<4>; 3] {
    let [len, b, ..] = q.dims();
    let wide = whole.lse.dtype();
    let device = q.device();
    let order = mask.order(Span::of_all(group.size()), [len, b], &device);
    let [k, v] = gathered([k, v], &order, group);
    let mut sums = [&q, &k, &v].map(|x| GradientSum::new(x.dims(), wide));
    for part in with_all_keys(mask, sequence_chunk(group), len) {
        let found = gradients(&part, [&q, &k, &v], whole, &dout);
        let starts = [part.queries.start, part.keys.start, part.keys.start];
        for ((sum, start), found) in sums.iter_mut().zip(starts).zip(found) {
            sum.add(start, found);
        }
    }
    let [dq, dk, dv] = sums.map(|sum| sum.finish(&device));
    let [dk, dv] = [dk, dv].map(|sum| {
        let sum = order.to_members(sum);
        unwrap_collective(tensors::reduce_scatter(
            sum,
            ReduceOp::Sum,
            group,
            Lane::InOrder,
        ))
        .wait()
    });
    [dq, dk, dv]
}
