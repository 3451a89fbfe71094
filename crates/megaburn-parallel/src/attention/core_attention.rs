use std::ops::Range;

use burn::{
    module::{Module, Param},
    tensor::Tensor,
};
use megaburn_kernels::{
    AttentionDropout, AttentionOptions, DropoutKey, attention, partial_attention,
};
use megaburn_mesh::{PositionRng, Purpose, ShardSpec};

use super::AttentionGroups;
use crate::{
    context::{ContextParallel, Mask, PackedDocuments, Piece, context_attention},
    dropout,
    error::ParallelError,
    kv_cache::{KvCache, Packed},
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
    sinks: Option<Param<Tensor<1>>>,
    /// Which heads the sinks belong to, and the path that keys their draw.
    #[module(skip)]
    sinks_spec: Option<(ShardSpec, Option<String>)>,
    /// Query heads and key/value heads of this rank.
    #[module(skip)]
    heads: [usize; 2],
    /// The mask that applies to every pass; [`forward`](Self::forward) adds dropout and documents.
    #[module(skip)]
    mask: Mask,
    recompute: bool,
    #[module(skip)]
    dropout: Option<Dropout>,
    #[module(skip)]
    parallel: ContextParallel,
}

/// Which attention probabilities are dropped in training; the same ones under every layout.
#[derive(Clone, Debug)]
struct Dropout {
    prob: f64,
    /// The run's seed, which keys the masks together with the name.
    seed: u64,
    name: String,
    /// Index of this rank's first head, and the number of heads over all ranks.
    first_head: usize,
    num_heads: usize,
}

/// Configuration of a [`CoreAttention`].
pub(super) struct CoreConfig<'a> {
    /// The layer's type, for error messages.
    pub(super) layer: &'static str,
    /// The layer's path in the model, which keys dropout.
    pub(super) path: Option<&'a str>,
    /// Query heads and key/value heads of this rank.
    pub(super) heads: [usize; 2],
    pub(super) mask: Mask,
    pub(super) recompute: bool,
    pub(super) dropout: f64,
}

impl CoreConfig<'_> {
    /// Builds the core.
    ///
    /// # Errors
    /// The dropout probability is outside of `[0, 1)` or has no path to key its masks, or the heads
    /// are exchanged and the ranks do not divide them.
    pub(super) fn init(self, groups: &AttentionGroups) -> Result<CoreAttention, ParallelError> {
        let Self {
            layer,
            heads,
            mask,
            recompute,
            dropout: prob,
            ..
        } = self;
        let name = self.path.unwrap_or("unnamed");
        let refuse = |why: String| ParallelError::Config {
            layer,
            name: name.into(),
            why,
        };
        dropout::check(layer, name, prob)?;
        if prob > 0.0 && self.path.is_none() {
            let why = "dropout needs a name, which keys its masks: add `.with_name(\"path\")`";
            return Err(refuse(why.into()));
        }
        let AttentionGroups { tp, cp } = groups;
        cp.comm()
            .check(cp.num_ranks(), heads)
            .map_err(|error| match error {
                ParallelError::Config {
                    name: comm, why, ..
                } => refuse(format!("cp_comm `{comm}`: {why}")),
                error => error,
            })?;
        let dropout = (prob > 0.0).then(|| Dropout {
            prob,
            seed: tp.seed(),
            name: format!("{name}.probabilities"),
            first_head: tp.rank() * heads[0],
            num_heads: tp.size() * heads[0],
        });
        Ok(CoreAttention {
            sinks: None,
            sinks_spec: None,
            heads,
            mask,
            recompute,
            dropout,
            parallel: cp.clone(),
        })
    }
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

    /// Returns this core without context parallelism.
    pub(super) fn whole_sequence(self) -> Self {
        Self {
            parallel: ContextParallel::none(),
            ..self
        }
    }

    /// Attends `[seq, batch, heads, head_dim]` queries, keys and values to
    /// `[seq, batch, heads * head_dim]` with the head size of the values. In training some
    /// probabilities are dropped.
    pub(super) fn forward(
        &self,
        queries_keys_values: [Tensor<4>; 3],
        batch: &BatchContext,
    ) -> Tensor<3> {
        let BatchContext {
            block,
            documents,
            parallel,
            saved_attention,
            ..
        } = batch;
        let parallel = parallel.as_ref().unwrap_or(&self.parallel).clone();
        let is_trained = queries_keys_values[0].device().is_autodiff();
        let block = block.filter(|_| is_trained);
        let documents = documents.clone();
        // With selective save, the outer recompute reuses the saved output; recomputing attention
        // by itself would save nothing.
        if !self.recompute || saved_attention.is_some() {
            let saved = saved_attention.as_ref();
            return self.whole(queries_keys_values, block, documents, &parallel, saved);
        }
        let inputs = queries_keys_values.map(Recomputable::from);
        let again = move |core: &Self, inputs| {
            [core.whole(inputs, block, documents.clone(), &parallel, None)]
        };
        let [attended] = recomputed(self, inputs, again);
        attended
    }

    /// Attends the next tokens of some sequences to the keys and values in `cache` and their own,
    /// which it appends to `cache`. The output is `[rows, 1, heads * head_dim]`.
    pub(super) fn cached(
        &self,
        [q, k, v]: [Tensor<4>; 3],
        packed: &Packed,
        cache: &mut KvCache,
    ) -> Tensor<3> {
        let rows = |all: &Tensor<4>, of: &Range<usize>| all.clone().narrow(0, of.start, of.len());
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
                let Some(sinks) = &self.sinks else {
                    return attention(rows(&q, &own), keys, values, options);
                };
                let part = partial_attention(rows(&q, &own), keys, values, options);
                let out = part.with_sinks(sinks.val()).out.cast(q.dtype());
                let [len, b, heads, size] = out.dims();
                out.reshape([len, b, heads * size])
            },
        );
        let mut all: Vec<Tensor<3>> = attended.collect();
        let found: usize = all.iter().map(|rows| rows.dims()[0]).sum();
        if found < packed.num_rows() {
            let shape = [packed.num_rows() - found, 1, self.heads[0] * v.dims()[3]];
            all.push(Tensor::zeros(shape, (&q.device(), q.dtype())));
        }
        Tensor::cat(all, 0)
    }

    /// Attends full sequences, or this rank's chunks of sequences that ranks share.
    fn whole(
        &self,
        queries_keys_values: [Tensor<4>; 3],
        block: Option<TokenBlock>,
        documents: Option<PackedDocuments>,
        parallel: &ContextParallel,
        saved: Option<&SelectiveSave>,
    ) -> Tensor<3> {
        let [seq, _, heads, _] = queries_keys_values[0].dims();
        let ranks = parallel.num_ranks();
        let dropout = self
            .dropout
            .as_ref()
            .zip(block)
            .map(|(dropout, block)| dropout.of(block, seq * ranks, parallel.first_head(heads)));
        let mask = Mask {
            dropout,
            documents,
            ..self.mask.clone()
        };
        let sinks = self.sinks.as_ref().map(Param::val);
        if ranks > 1 || saved.is_some() || sinks.is_some() {
            return context_attention(queries_keys_values, sinks, mask, parallel, saved);
        }
        let [q, k, v] = queries_keys_values;
        attention(q, k, v, mask.whole())
    }
}

impl Sharded for CoreAttention {
    fn shards(&self, plan: &mut PlanBuilder) {
        if let Some((spec, path)) = &self.sinks_spec {
            plan.drawn_from(path.as_deref());
            plan.param("sinks", spec);
        }
    }
}

impl Dropout {
    /// The dropout of sequences of `seq` tokens for this rank's heads from `head` on.
    fn of(&self, block: TokenBlock, seq: usize, head: usize) -> AttentionDropout {
        let rng = PositionRng::new(self.seed, Purpose::Dropout, &self.name).with_stream(block.step);
        let key = DropoutKey::new(rng, &[block.global_batch, self.num_heads, seq, seq])
            .with_offset(0, block.first_sample)
            .with_offset(1, self.first_head + head);
        AttentionDropout::new(self.prob, key)
    }
}
