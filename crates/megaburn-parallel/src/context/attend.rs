//! Context-parallel attention as one autodiff operation.

use burn::tensor::{DType, Tensor};
use megaburn_autograd::CheckpointOperands;
use megaburn_kernels::{PartialAttention, sink_gradients};

use super::{
    ContextComm, ContextParallel, Mask, all_gather,
    heads::Heads,
    part_attention::{attend, gradients},
    parts::{KeyValuePart, with_peer_keys},
    ring,
};
use crate::selective_save::SelectiveSave;

/// [`attention`](megaburn_kernels::attention) of this rank's queries to full sequences. `mask`
/// refers to positions of the full sequences and to the heads that this rank attends with.
///
/// With `sinks`, each of this rank's heads has a logit that takes part in its softmax without a value.
///
/// Saved for backward are queries, keys, values and this rank's output, which may be [saved across
/// a recompute](SelectiveSave) in `saved`. Backward communicates keys and values a second time.
///
/// # Shapes
/// - `q`: `[len, b, hq, d]`, `k`: `[len, b, hkv, d]`, `v`: `[len, b, hkv, d_v]`, in the chunks of
///   [`Zigzag`]
/// - result: `[len, b, hq * d_v]`
///
/// [`Zigzag`]: megaburn_mesh::Zigzag
/// # Collective
/// All ranks that share the sequences, forward and backward; see [`ContextComm`].
///
/// # Panics
/// If the ranks do not divide the documents, or if there is dropout with documents and queries do
/// not see full sequences: the positions of a row are then spread over ranks.
#[expect(
    clippy::panic,
    reason = "documented: validation refuses such documents earlier"
)]
pub(crate) fn context_attention(
    qkv: [Tensor<4>; 3],
    sinks: Option<Tensor<1>>,
    mask: Mask,
    parallel: &ContextParallel,
    saved: Option<&SelectiveSave>,
) -> Tensor<3> {
    if let Some(documents) = &mask.documents {
        documents
            .documents()
            .check(parallel.zigzag())
            .unwrap_or_else(|error| panic!("{error}"));
        let is_whole = parallel.sequence.size() == 1;
        assert!(
            is_whole || mask.dropout.is_none(),
            "attention dropout is not supported in documents that are sharded over ranks"
        );
    }
    let device = qkv[0].device();
    let is_trained = device.is_autodiff();
    let plain = qkv.clone().map(|x| if is_trained { x.inner() } else { x });
    let heads = Heads::new(parallel, &mask, &plain[0]);
    let shared = plain.map(|x| heads.share(x));
    let own_sinks = sinks
        .as_ref()
        .map(|sinks| Sinks::new(sinks, parallel, &shared[0]));
    let attend = || {
        let part = forward(shared.clone(), &mask, parallel);
        match &own_sinks {
            Some(sinks) => part.with_sinks(sinks.own.clone()),
            None => part,
        }
    };
    let whole = match saved {
        Some(saved) => saved.output(attend),
        None => attend(),
    };
    let joined = |x: Tensor<4>| {
        let out = heads.join(x);
        let [len, b, hq, d_v] = out.dims();
        out.reshape([len, b, hq * d_v])
    };
    let out = joined(whole.out.clone());
    if !is_trained {
        return out;
    }
    let mut operands = CheckpointOperands::new(&device);
    qkv.into_iter().for_each(|x| operands.add(x));
    sinks.into_iter().for_each(|x| operands.add(x));
    let parallel = parallel.clone();
    let [out] = operands.results([Tensor::from_inner(out)], move |[dout]| {
        let dout = dout.expect("the result has a gradient");
        let [len, b, width] = dout.dims();
        let hq = shared[0].dims()[2] * parallel.heads.size();
        let dout = heads.share(dout.reshape([len, b, hq, width / hq]));
        let of_sinks = own_sinks.map(|sinks| sinks.gradient(&whole, dout.clone()));
        let dtypes = shared.each_ref().map(Tensor::dtype);
        let found = backward(shared, &whole, dout, &mask, &parallel);
        let found = found.into_iter().zip(dtypes);
        found
            .map(|(gradient, dtype)| Some(heads.join(gradient.cast(dtype)).flatten(0, 2)))
            .chain(of_sinks.map(Some))
            .collect()
    });
    out
}

/// The sinks of the heads that this rank attends with.
struct Sinks {
    own: Tensor<1>,
    /// The index of the first of them, and the number and the type of all sinks.
    first: usize,
    all: usize,
    dtype: DType,
}

impl Sinks {
    /// Takes the sinks of the heads of `q`, `[len, b, heads, d]`, from `all` sinks.
    fn new(all: &Tensor<1>, parallel: &ContextParallel, q: &Tensor<4>) -> Self {
        let own = if all.device().is_autodiff() {
            all.clone().inner()
        } else {
            all.clone()
        };
        let [count] = all.dims();
        let first = parallel.first_head(count);
        Self {
            own: own.narrow(0, first, q.dims()[2]),
            first,
            all: count,
            dtype: all.dtype(),
        }
    }

    /// The gradient of all sinks as one row. Sinks of other ranks' heads have the gradient zero.
    fn gradient(self, whole: &PartialAttention, dout: Tensor<4>) -> Tensor<2> {
        let found = sink_gradients(self.own, whole, dout).cast(self.dtype);
        let [len] = found.dims();
        let zeros = |len: usize| Tensor::zeros([len], (&found.device(), self.dtype));
        let behind = self.all - self.first - len;
        let parts = [zeros(self.first), found.clone(), zeros(behind)];
        let filled = parts.into_iter().filter(|part| part.dims()[0] > 0);
        Tensor::cat(filled.collect(), 0).reshape([1, self.all])
    }
}

fn forward(qkv: [Tensor<4>; 3], mask: &Mask, parallel: &ContextParallel) -> PartialAttention {
    if let Some(part) = whole(&qkv, mask, parallel) {
        let PartialAttention { out, lse } = attend(&part, qkv.each_ref(), mask.recorder.as_ref());
        return PartialAttention {
            out: out.cast(qkv[0].dtype()),
            lse,
        };
    }
    match parallel.comm {
        ContextComm::AllGather => all_gather::forward(qkv, mask, &parallel.sequence),
        _ => ring::forward(qkv, mask, &parallel.sequence),
    }
}

fn backward(
    qkv: [Tensor<4>; 3],
    whole: &PartialAttention,
    dout: Tensor<4>,
    mask: &Mask,
    parallel: &ContextParallel,
) -> [Tensor<4>; 3] {
    if let Some(part) = self::whole(&qkv, mask, parallel) {
        return gradients(&part, qkv.each_ref(), whole, &dout);
    }
    match parallel.comm {
        ContextComm::AllGather => all_gather::backward(qkv, whole, dout, mask, &parallel.sequence),
        _ => ring::backward(qkv, whole, dout, mask, &parallel.sequence),
    }
}

/// All of attention as a single part, where this rank has full sequences and nothing is merged.
fn whole(
    [q, ..]: &[Tensor<4>; 3],
    mask: &Mask,
    parallel: &ContextParallel,
) -> Option<KeyValuePart> {
    let sequence_chunk = parallel.sequence_chunk();
    let is_whole = sequence_chunk.ranks() == 1;
    is_whole
        .then(|| with_peer_keys(mask, sequence_chunk, sequence_chunk, q.dims()[0]).swap_remove(0))
}
