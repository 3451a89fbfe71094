use std::ops::Range;

use burn::{
    module::{Module, Param},
    tensor::Tensor,
};
use megaburn_autograd::LinearPass;
use megaburn_kernels::{AttentionOptions, attention, partial_attention};
use megaburn_mesh::ShardSpec;

use super::{
    probability_dropout::ProbabilityDropout, relative_bias::line, whole_attention::whole_attention,
};
use crate::{
    context::{ContextParallel, Mask, PackedDocuments, Piece, context_attention},
    kv_cache::{KvCache, Packed},
    max_logits::MaxLogits,
    recomputable::Recomputable,
    recompute::recomputed,
    selective_save::SelectiveSave,
    shards::{PlanBuilder, Sharded},
    tokens::{BatchContext, TokenBlock},
};

/// The core of an attention layer: mask, softmax, dropout, and context-parallel communication,
/// between the QKV projection and the output projection. Its only parameters are sinks.
#[derive(Module, Debug)]
pub(super) struct CoreAttention {
    /// A logit for each query head of this rank, which takes part in the softmax without a value.
    pub(super) sinks: Option<Param<Tensor<1>>>,
    /// Which heads the sinks belong to, and the path that keys their draw.
    #[module(skip)]
    pub(super) sinks_spec: Option<(ShardSpec, Option<String>)>,
    /// Query heads and key/value heads of this rank.
    #[module(skip)]
    pub(super) heads: [usize; 2],
    /// The mask that applies to every pass; [`forward`](Self::forward) adds dropout and documents.
    #[module(skip)]
    pub(super) mask: Mask,
    pub(super) recompute: bool,
    /// Whether scores have a bias by distance, which callers give.
    pub(super) relative_bias: bool,
    #[module(skip)]
    pub(super) dropout: Option<ProbabilityDropout>,
    #[module(skip)]
    pub(super) parallel: ContextParallel,
    /// Where training records the largest logit of each head; `None` records none.
    #[module(skip)]
    pub(super) max_logits: Option<MaxLogits>,
}

impl CoreAttention {
    /// Gives this core the sinks of its heads, whose draw the path keys.
    pub(super) fn with_sinks(
        self,
        (sinks, spec): (Param<Tensor<1>>, ShardSpec),
        path: Option<String>,
    ) -> Self {
        Self {
            sinks: Some(sinks),
            sinks_spec: Some((spec, path)),
            ..self
        }
    }

    /// Query heads and key/value heads of this rank.
    pub(super) fn num_heads(&self) -> [usize; 2] {
        self.heads
    }

    /// The largest logits of this rank's heads, if they are recorded.
    pub(super) fn max_logits(&self) -> Option<&MaxLogits> {
        self.max_logits.as_ref()
    }

    /// Returns this core without context parallelism.
    pub(super) fn whole_sequence(self) -> Self {
        Self {
            parallel: ContextParallel::none(),
            ..self
        }
    }

    /// Attends `[seq, batch, heads, head_dim]` queries, keys and values to
    /// `[seq, batch, heads * head_dim]` with the head size of the values. In training some
    /// probabilities are dropped. `relative` is the line of a
    /// [`RelativeBias`](super::RelativeBias).
    pub(super) fn forward(
        &self,
        queries_keys_values: [Tensor<4>; 3],
        relative: Option<&Tensor<3>>,
        batch: &BatchContext,
    ) -> Tensor<3> {
        let BatchContext {
            block,
            documents,
            parallel,
            saved_attention,
            loss_factor,
            ..
        } = batch;
        let parallel = parallel.as_ref().unwrap_or(&self.parallel).clone();
        let is_trained = queries_keys_values[0].device().is_autodiff();
        let block = block.filter(|_| is_trained);
        let documents = documents.clone();
        let [seq, ..] = queries_keys_values[0].dims();
        let bias = self.bias(relative).map(|bias| line(bias, 0, seq, seq));
        let is_training = loss_factor.is_some();
        // With selective save, the outer recompute reuses the saved output; recomputing attention
        // by itself would save nothing.
        if !self.recompute || saved_attention.is_some() {
            let saved = saved_attention.as_ref();
            let parts = (block, documents, is_training);
            return self.whole(queries_keys_values, bias, parts, &parallel, saved);
        }
        let whole = move |core: &Self, inputs, bias| {
            let parts = (block, documents.clone(), is_training);
            [core.whole(inputs, bias, parts, &parallel, None)]
        };
        let [attended] = match bias {
            None => {
                let inputs = queries_keys_values.map(Recomputable::from);
                recomputed(self, inputs, move |core, inputs| whole(core, inputs, None))
            }
            Some(bias) => {
                let [q, k, v] = queries_keys_values;
                let inputs = [q, k, v, bias.unsqueeze()].map(Recomputable::from);
                recomputed(self, inputs, move |core, [q, k, v, bias]| {
                    let [.., heads, columns] = bias.dims();
                    whole(core, [q, k, v], Some(bias.reshape([heads, columns])))
                })
            }
        };
        attended
    }

    /// Attends `[s_dec, batch, heads, head_dim]` queries to the `[s_enc, batch, heads, head_dim]`
    /// keys and values of an encoder's output, without its padding. The result is
    /// `[s_dec, batch, heads * head_dim]`.
    ///
    /// # Panics
    /// If the encoder of `batch` does not fit the keys, or ranks share the sequences.
    pub(super) fn cross(&self, inputs: [Tensor<4>; 3], batch: &BatchContext) -> Tensor<3> {
        let BatchContext {
            block,
            encoder,
            parallel,
            saved_attention,
            ..
        } = batch;
        let shared = parallel.as_ref().map_or(1, ContextParallel::num_ranks);
        assert!(
            shared == 1,
            "cross attention does not support sequences that {shared} context-parallel ranks share"
        );
        let [s_q, _, heads, _] = inputs[0].dims();
        let s_k = inputs[1].dims()[0];
        if let Some(rows) = encoder {
            let len = rows.len;
            assert_eq!(
                len, s_k,
                "an encoder of {len} positions does not fit the {s_k} keys of cross attention"
            );
        }
        let is_trained = inputs[0].device().is_autodiff();
        let block = block.filter(|_| is_trained);
        let dropout = self.dropout.as_ref().zip(block);
        let dropout = dropout
            .map(|(dropout, block)| dropout.of(block, [s_q, s_k], self.parallel.first_head(heads)));
        let options = AttentionOptions {
            dropout,
            sequences: encoder.as_ref().and_then(|rows| rows.crossed(s_q)),
            ..self.mask.whole()
        };
        if !self.recompute || saved_attention.is_some() {
            return whole_attention(inputs, None, options, saved_attention.as_ref());
        }
        let inputs = inputs.map(Recomputable::from);
        let [attended] = recomputed(self, inputs, move |_, inputs| {
            [whole_attention(inputs, None, options.clone(), None)]
        });
        attended
    }

    /// The bias that the caller gave, if scores have one.
    fn bias<'a>(&self, relative: Option<&'a Tensor<3>>) -> Option<&'a Tensor<3>> {
        self.relative_bias
            .then(|| relative.expect("a layer with a relative bias is given its line"))
    }

    /// Attends the next tokens of some sequences to the keys and values in `cache` and their own,
    /// which it appends to `cache`. The output is `[rows, 1, heads * head_dim]`.
    pub(super) fn cached(
        &self,
        [q, k, v]: [Tensor<4>; 3],
        relative: Option<&Tensor<3>>,
        packed: &Packed,
        cache: &mut KvCache,
    ) -> Tensor<3> {
        let bias = self.bias(relative);
        let width = self.heads[0] * v.dims()[3];
        let [k, v] = [k, v].map(|x| match packed.share() {
            Some(share) => share.gathered(x),
            None => x,
        });
        let read: Vec<_> = packed
            .segments()
            .iter()
            .map(|segment| {
                cache.append(
                    segment.sequence,
                    rows(&k, &segment.rows),
                    rows(&v, &segment.rows),
                )
            })
            .collect();
        let attended = packed.pieces().into_iter().map(
            |Piece {
                 segment,
                 own,
                 start,
                 ..
             }| {
                let (keys, values) = read[segment].clone();
                let options = AttentionOptions {
                    query_offset: start,
                    ..self.mask.whole()
                };
                let bias = bias.map(|bias| line(bias, start, own.len(), keys.dims()[0]));
                let Some(sinks) = &self.sinks else {
                    return whole_attention([rows(&q, &own), keys, values], bias, options, None);
                };
                let part = partial_attention(rows(&q, &own), keys, values, options);
                let out = part.with_sinks(sinks.val()).out.cast(q.dtype());
                let [len, b, heads, size] = out.dims();
                out.reshape([len, b, heads * size])
            },
        );
        joined(attended.collect(), packed, width, &q)
    }

    /// Attends the next tokens of some sequences to the keys and values of each sequence's memory.
    /// The output is `[rows, 1, heads * head_dim]`.
    ///
    /// # Panics
    /// If a sequence has no memory.
    pub(super) fn cross_cached(
        &self,
        q: Tensor<4>,
        packed: &Packed,
        memory: &KvCache,
    ) -> Tensor<3> {
        let width = self.heads[0] * q.dims()[3];
        let attended = packed
            .pieces()
            .into_iter()
            .map(|Piece { segment, own, .. }| {
                let sequence = packed.segments()[segment].sequence;
                let [keys, values] = memory
                    .of(sequence)
                    .unwrap_or_else(|| unreachable!("sequence {sequence} has no memory"));
                attention(rows(&q, &own), keys, values, self.mask.whole())
            });
        joined(attended.collect(), packed, width, &q)
    }

    /// Attends full sequences, or this rank's chunks of sequences that ranks share. In training, the
    /// first forward pass records the largest logits.
    fn whole(
        &self,
        queries_keys_values: [Tensor<4>; 3],
        bias: Option<Tensor<2>>,
        (block, documents, is_training): (Option<TokenBlock>, Option<PackedDocuments>, bool),
        parallel: &ContextParallel,
        saved: Option<&SelectiveSave>,
    ) -> Tensor<3> {
        let [seq, _, heads, _] = queries_keys_values[0].dims();
        let ranks = parallel.num_ranks();
        let dropout = self.dropout.as_ref().zip(block).map(|(dropout, block)| {
            dropout.of(block, [seq * ranks; 2], parallel.first_head(heads))
        });
        let is_recorded = is_training && !LinearPass::is_backward();
        let recorded = self.max_logits.as_ref().filter(|_| is_recorded);
        let mask = Mask {
            dropout,
            documents,
            recorder: recorded.map(|logits| logits.recorder(parallel.first_head(heads))),
            ..self.mask.clone()
        };
        let sinks = self.sinks.as_ref().map(Param::val);
        if bias.is_some() {
            assert!(
                ranks == 1,
                "a relative bias does not support sequences that {ranks} context-parallel ranks \
                share"
            );
            return whole_attention(queries_keys_values, bias, mask.whole(), saved);
        }
        if ranks > 1 || saved.is_some() || sinks.is_some() {
            return context_attention(queries_keys_values, sinks, mask, parallel, saved);
        }
        let [q, k, v] = queries_keys_values;
        if let Some(recorder) = &mask.recorder {
            recorder.add([&q, &k], &mask.whole());
        }
        attention(q, k, v, mask.whole())
    }
}

fn rows(all: &Tensor<4>, of: &Range<usize>) -> Tensor<4> {
    all.clone().narrow(0, of.start, of.len())
}

/// The attended pieces of a pass as its rows, with zeros in rows of padding.
fn joined(mut all: Vec<Tensor<3>>, packed: &Packed, width: usize, like: &Tensor<4>) -> Tensor<3> {
    let found: usize = all.iter().map(|rows| rows.dims()[0]).sum();
    if found < packed.num_rows() {
        let shape = [packed.num_rows() - found, 1, width];
        all.push(Tensor::zeros(shape, (&like.device(), like.dtype())));
    }
    Tensor::cat(all, 0)
}

impl Sharded for CoreAttention {
    fn shards(&self, plan: &mut PlanBuilder) {
        if let Some((spec, path)) = &self.sinks_spec {
            plan.drawn_from(path.as_deref());
            plan.param("sinks", spec);
        }
    }
}
