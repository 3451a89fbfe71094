//! Ring attention: keys and values are passed around the ranks that share a sequence, followed by
//! the partial sums of their gradients.
//!
//! Source: Liu et al. (2023), "Ring Attention", <https://arxiv.org/abs/2310.01889>.

use burn::tensor::Tensor;
use megaburn_collective::{
    Group, Lane,
    tensors::{self, Work},
};
use megaburn_kernels::{OnlineSoftmaxMerge, PartialAttention};
use megaburn_mesh::Zigzag;

use super::{
    Mask,
    part_attention::{GradientSum, attend, gradients},
    parts::with_peer_keys,
    unwrap_collective,
};

/// The chunks of the member `back` places earlier in the ring.
fn sequence_chunk(group: &Group, back: usize) -> Zigzag {
    let size = group.size();
    Zigzag::new((group.rank() + size - back) % size, size)
}

/// Sends `all` to the next member and receives from the previous one.
fn pass_on<const N: usize>(all: [Tensor<4>; N], group: &Group) -> [Work<Tensor<4>>; N] {
    all.map(|x| unwrap_collective(tensors::shift(x, 1, group, Lane::Overlapped)))
}

/// Attention of this rank's queries to the keys of all members.
///
/// # Shapes
/// `q: [len, b, hq, d]`, `k, v: [len, b, hkv, d]`, off the autodiff device
pub(super) fn forward([q, k, v]: [Tensor<4>; 3], mask: &Mask, group: &Group) -> PartialAttention {
    let [len, b, hq, _] = q.dims();
    let [.., d_v] = v.dims();
    let dtype = q.dtype();
    let mut sum = OnlineSoftmaxMerge::new([len, b, hq, d_v]);
    let mut here = [k, v];
    for step in 0..group.size() {
        let is_last = step + 1 == group.size();
        let coming = (!is_last).then(|| pass_on(here.clone(), group));
        for part in with_peer_keys(
            mask,
            sequence_chunk(group, 0),
            sequence_chunk(group, step),
            len,
        ) {
            let [k, v] = here.clone();
            let found = attend(&part, [&q, &k, &v], mask.recorder.as_ref());
            sum.add(part.queries.start, found);
        }
        if let Some(coming) = coming {
            here = coming.map(Work::wait);
        }
    }
    sum.finish(dtype)
}

/// The gradients of `q`, `k` and `v` in the dtype of the sums. The gradient sums of a rank's keys
/// and values follow them around the ring and arrive back at their owner after the last step.
pub(super) fn backward(
    [q, k, v]: [Tensor<4>; 3],
    whole: &PartialAttention,
    dout: Tensor<4>,
    mask: &Mask,
    group: &Group,
) -> [Tensor<4>; 3] {
    let len = q.dims()[0];
    let wide = whole.lse.dtype();
    let shapes = [k.dims(), v.dims()];
    let device = q.device();
    let mut of_queries = GradientSum::new(q.dims(), wide);
    let mut here = [k, v];
    // Gradient sums of the keys and values at hand, up to the previous rank.
    let mut sums = None;
    for step in 0..group.size() {
        let is_last = step + 1 == group.size();
        let coming = (!is_last).then(|| pass_on(here.clone(), group));
        let mut found = Vec::new();
        for part in with_peer_keys(
            mask,
            sequence_chunk(group, 0),
            sequence_chunk(group, step),
            len,
        ) {
            let [k, v] = &here;
            let [dq, dk, dv] = gradients(&part, [&q, k, v], whole, &dout);
            of_queries.add(part.queries.start, dq);
            found.push((part.keys.start, [dk, dv]));
        }
        // Wait only now: the sums were in flight while these gradients were computed.
        let mut of_stretch = match sums.take() {
            Some(sums) => <[Work<_>; 2]>::map(sums, |sum| GradientSum::of(sum.wait())),
            None => shapes.map(|shape| GradientSum::new(shape, wide)),
        };
        for (start, found) in found {
            let both = of_stretch.iter_mut().zip(found);
            both.for_each(|(sum, gradient)| sum.add(start, gradient));
        }
        sums = Some(pass_on(of_stretch.map(|sum| sum.finish(&device)), group));
        if let Some(coming) = coming {
            here = coming.map(Work::wait);
        }
    }
    let [dk, dv] = sums
        .expect("a ring has at least one member")
        .map(Work::wait);
    [of_queries.finish(&device), dk, dv]
}
