mod core_attention;

use std::ops::Range;

use burn::{config::Config, module::Module, nn::Initializer, prelude::Device, tensor::Tensor};
use megaburn_collective::Group;
use megaburn_kernels::{Cut, RopeTable, apply_rope, split_last_with};
use megaburn_mesh::Part;

use crate::context::Piece;
use crate::{
    ContextParallel, Input, KvCache, Norm, NormConfig, Packed, ParallelError, ParallelLinear,
    ParallelLinearConfig, PlanBuilder, Sharded, TokenContext, dropout,
};
use core_attention::{CoreAttention, Dropout};

/// Configuration of a [`SelfAttention`].
#[derive(Config, Debug)]
pub struct SelfAttentionConfig {
    /// Features of the residual stream.
    pub d_model: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads (groups); fewer than ranks are replicated.
    pub num_kv_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Whether queries, keys and values have biases.
    #[config(default = false)]
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    #[config(default = false)]
    pub output_bias: bool,
    /// Epsilon of an RMS norm over each query and key head, before the rotation (Qwen3); none
    /// without such norms.
    pub qk_norm: Option<f64>,
    /// Whether a query sees no position behind its own.
    #[config(default = true)]
    pub causal: bool,
    /// A query sees this many positions up to its own, that included; none: all.
    pub window: Option<usize>,
    /// Whether input and output hold this rank's stretch of the sequence only.
    #[config(default = false)]
    pub sequence_parallel: bool,
    /// How the query, key and value matrices start.
    #[config(default = "Initializer::Normal { mean: 0.0, std: 0.02 }")]
    pub initializer: Initializer,
    /// How the output matrix starts.
    #[config(default = "Initializer::Normal { mean: 0.0, std: 0.02 }")]
    pub output_initializer: Initializer,
    /// The module's path in the model.
    pub path: Option<String>,
}

impl SelfAttentionConfig {
    /// This rank's heads.
    ///
    /// # Errors
    /// Heads that the ranks do not divide; see also [`ParallelLinearConfig::init`].
    pub fn init(&self, group: &Group, device: &Device) -> Result<SelfAttention, ParallelError> {
        let Self { d_model, num_heads, num_kv_heads, head_dim, sequence_parallel, .. } = *self;
        let ranks = group.size();
        if num_kv_heads == 0 || !num_heads.is_multiple_of(num_kv_heads.max(ranks)) {
            let why = format!(
                "{num_heads} heads do not divide over {num_kv_heads} key/value heads and {ranks} ranks"
            );
            let name = self.path.clone().unwrap_or_else(|| "unnamed".into());
            return Err(ParallelError::Config { layer: "SelfAttention", name, why });
        }
        let heads = |count| Part::units(count, head_dim);
        let qkv = ParallelLinearConfig::column(d_model, (num_heads + 2 * num_kv_heads) * head_dim)
            .with_parts([heads(num_heads), heads(num_kv_heads), heads(num_kv_heads)])
            .with_bias(self.qkv_bias)
            .with_initializer(self.initializer.clone());
        let output = ParallelLinearConfig::row(num_heads * head_dim, d_model)
            .with_bias(self.output_bias)
            .with_initializer(self.output_initializer.clone());
        let layer = |mut config: ParallelLinearConfig, field: &str| {
            config.path = self.path.as_ref().map(|name| format!("{name}.{field}"));
            config
                .with_bias_initializer(Some(Initializer::Zeros))
                .with_sequence_parallel(sequence_parallel)
                .init(group, device)
        };
        let head_norm = || {
            // Each rank norms heads of its own, so that the scale's gradient is a sum over ranks.
            let config = NormConfig::rms(head_dim).with_sequence_parallel(true);
            self.qk_norm.map(|epsilon| config.with_epsilon(epsilon).init(group, device))
        };
        Ok(SelfAttention {
            qkv: layer(qkv, "qkv")?,
            q_norm: head_norm(),
            k_norm: head_norm(),
            output: layer(output, "output")?,
            heads: num_heads / ranks,
            kv_heads: (num_kv_heads / ranks).max(1),
            head_dim,
            core: CoreAttention {
                causal: self.causal,
                window: self.window,
                recompute: false,
                dropout: None,
                parallel: ContextParallel::none(),
            },
        })
    }
}

/// Self-attention with grouped queries, causal if nothing else is said, its heads split over a group.
///
/// Source: Vaswani et al. (2017); Ainslie et al. (2023) for grouped queries; Su et al. (2021) for
/// rotary positions.
/// # Collective
/// As a column and a row [`ParallelLinear`]. Norms of queries and keys add an all-reduce of their
/// scales' gradients to the backward.
#[derive(Module, Debug)]
pub struct SelfAttention {
    /// Queries, keys and values of this rank's heads, `[d_model, (q + 2 kv) head_dim]`.
    pub qkv: ParallelLinear,
    /// Over each head of the queries.
    pub q_norm: Option<Norm>,
    /// Over each head of the keys.
    pub k_norm: Option<Norm>,
    /// The output projection, `[q head_dim, d_model]`.
    pub output: ParallelLinear,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    core: CoreAttention,
}

impl SelfAttention {
    /// Whether backward computes attention itself once more, from queries, keys and values, instead of
    /// keeping its scores (Megatron's `core_attn`). The fused kernels of GPUs never hold them, so that
    /// there it is four bytes a head and token. Off at first.
    #[must_use]
    pub fn with_recompute(mut self, recompute: bool) -> Self {
        self.core.recompute = recompute;
        self
    }

    /// Drops a share of the probabilities in training. `name`, the module's path in the model, keys its
    /// masks; `group` is the one that has the heads.
    ///
    /// # Errors
    /// A share outside of `[0, 1)`.
    pub fn with_dropout(
        mut self,
        prob: f64,
        name: &str,
        group: &Group,
    ) -> Result<Self, ParallelError> {
        dropout::check("SelfAttention", name, prob)?;
        self.core.dropout = (prob > 0.0).then(|| Dropout {
            prob,
            seed: group.seed(),
            name: format!("{name}.probabilities"),
            first_head: group.rank() * self.heads,
            num_heads: group.size() * self.heads,
        });
        Ok(self)
    }

    /// Shares each sequence with other ranks, which hold [stretches](megaburn_mesh::Zigzag) of it.
    /// `name`, the module's path in the model, is for messages.
    ///
    /// # Errors
    /// Heads that the ranks do not divide, where those are shared out.
    /// # Collective
    /// Nothing is sent. Forward and backward then send as [`ContextComm`](crate::ContextComm) says.
    pub fn with_context_parallel(
        mut self,
        parallel: &ContextParallel,
        name: &str,
    ) -> Result<Self, ParallelError> {
        let heads = [self.heads, self.kv_heads];
        parallel.comm().check(parallel.num_ranks(), heads).map_err(|error| match error {
            ParallelError::Config { name: way, why, .. } => {
                let (layer, why) = ("SelfAttention", format!("cp_comm `{way}`: {why}"));
                ParallelError::Config { layer, name: name.into(), why }
            }
            error => error,
        })?;
        self.core.parallel = parallel.clone();
        Ok(self)
    }

    /// Applies the attention to whole sequences.
    ///
    /// # Shapes
    /// `[seq, batch, d_model]`, unchanged (with sequence and context parallelism `seq` is this rank's
    /// stretch); `rope` holds all positions of the tensor-parallel group, none where the model has learned
    /// positions.
    pub fn forward(&self, x: impl Into<Input<3>>, rope: Option<&RopeTable>) -> Tensor<3> {
        self.forward_in(x, &TokenContext::new(rope.cloned()))
    }

    /// The same of tokens of which more is known: in training some probabilities are dropped, documents do
    /// not see each other.
    ///
    /// # Shapes
    /// As [`forward`](Self::forward).
    pub fn forward_in(&self, x: impl Into<Input<3>>, context: &TokenContext) -> Tensor<3> {
        let queries_keys_values = self.queries_keys_values(x, context.rope.as_ref());
        self.output.forward(self.core.forward(queries_keys_values, context))
    }

    /// Applies the attention to the next tokens of some sequences, whose earlier keys and values
    /// `cache` holds and whose new ones it then holds too. Not for training.
    ///
    /// # Shapes
    /// `[rows, 1, d_model]`, unchanged: the tokens of `packed` that this rank reads; `rope` holds their
    /// positions. The layer is one without sequence parallelism.
    /// # Collective
    /// As [`forward`](Self::forward), but of whole sequences; ranks that share the pass gather keys and
    /// values.
    pub fn forward_cached(
        &self,
        x: impl Into<Input<3>>,
        rope: Option<&RopeTable>,
        packed: &Packed,
        cache: &mut KvCache,
    ) -> Tensor<3> {
        let [q, k, v] = self.queries_keys_values(x, rope);
        let rows = |all: &Tensor<4>, of: &Range<usize>| all.clone().narrow(0, of.start, of.len());
        let [k, v] = [k, v].map(|x| match packed.share() {
            Some(share) => share.gathered(x),
            None => x,
        });
        let read: Vec<_> = packed
            .segments()
            .iter()
            .map(|segment| {
                cache.append(segment.sequence, rows(&k, &segment.rows), rows(&v, &segment.rows))
            })
            .collect();
        let attended = packed.pieces().into_iter().map(|Piece { segment, own, start, .. }| {
            let (keys, values) = read[segment].clone();
            self.core.at(start, [rows(&q, &own), keys, values])
        });
        let mut all: Vec<Tensor<3>> = attended.collect();
        let found: usize = all.iter().map(|rows| rows.dims()[0]).sum();
        if found < packed.num_rows() {
            let shape = [packed.num_rows() - found, 1, self.heads * self.head_dim];
            all.push(Tensor::zeros(shape, (&q.device(), q.dtype())));
        }
        self.output.forward(Tensor::cat(all, 0))
    }

    /// The same layer and weights for whole sequences, as generation needs it.
    pub fn whole_sequence(self) -> Self {
        let Self { qkv, output, core, .. } = self;
        let core = CoreAttention { parallel: ContextParallel::none(), ..core };
        Self { qkv: qkv.whole_sequence(), output: output.whole_sequence(), core, ..self }
    }

    /// Normed and rotated, `[seq, batch, heads, head_dim]` each.
    fn queries_keys_values(
        &self,
        x: impl Into<Input<3>>,
        rope: Option<&RopeTable>,
    ) -> [Tensor<4>; 3] {
        let qkv = self.qkv.forward(x);
        let [seq, batch, _] = qkv.dims();
        let counts = [self.heads, self.kv_heads, self.kv_heads];
        // Backward reads values, and of queries and keys what rotations made of them: values that were a
        // view would keep all three once more. (Norms keep what they read.)
        let alone = rope.is_some() && self.q_norm.is_none() && qkv.device().is_autodiff();
        let cuts = [Cut::View, Cut::View, if alone { Cut::Copy } else { Cut::View }];
        let parts = split_last_with(qkv, counts.map(|count| count * self.head_dim), cuts);
        let [q, k, v] = parts.map(|part| {
            let count = part.dims()[2] / self.head_dim;
            part.reshape([seq, batch, count, self.head_dim])
        });
        let placed = |x: Tensor<4>, norm: &Option<Norm>| {
            let x = norm.iter().fold(x, |x, norm| norm.forward(x));
            rope.into_iter().fold(x, apply_rope)
        };
        [placed(q, &self.q_norm), placed(k, &self.k_norm), v]
    }
}

impl Sharded for SelfAttention {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.child("qkv", &self.qkv);
        for (name, norm) in [("q_norm", &self.q_norm), ("k_norm", &self.k_norm)] {
            norm.iter().for_each(|norm| plan.child(name, norm));
        }
        plan.child("output", &self.output);
    }
}
