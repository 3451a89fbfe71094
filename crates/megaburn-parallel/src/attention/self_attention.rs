use burn::{config::Config, module::Module, nn::Initializer, prelude::Device, tensor::Tensor};
use megaburn_collective::Group;
use megaburn_kernels::{RopeTable, SliceMode, apply_rope, split_last_with};
use megaburn_mesh::FusedPart;

use super::core_attention::CoreAttention;
use crate::{
    ContextParallel, KvCache, Norm, NormConfig, Packed, ParallelError, ParallelLinear,
    ParallelLinearConfig, PlanBuilder, Recomputable, Sharded, TokenContext, context::Mask,
};

/// Configuration of a [`SelfAttention`].
#[derive(Config, Debug)]
pub struct SelfAttentionConfig {
    /// Features of the residual stream.
    pub d_model: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads (query groups). If there are fewer than ranks, they are replicated.
    pub num_kv_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Whether queries, keys and values have biases.
    #[config(default = false)]
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    #[config(default = false)]
    pub output_bias: bool,
    /// Epsilon of an RMS norm over each query and key head before the rotation (Qwen3); `None` has
    /// no such norms.
    pub qk_norm: Option<f64>,
    /// Whether a query attends to no later position.
    #[config(default = true)]
    pub causal: bool,
    /// Sliding window: a query attends to this many positions, its own being the last; `None` means
    /// all.
    pub window: Option<usize>,
    /// Whether input and output are sharded along the sequence.
    #[config(default = false)]
    pub sequence_parallel: bool,
    /// Initializer of the query, key and value matrices.
    #[config(default = "Initializer::Normal { mean: 0.0, std: 0.02 }")]
    pub initializer: Initializer,
    /// Initializer of the output projection.
    #[config(default = "Initializer::Normal { mean: 0.0, std: 0.02 }")]
    pub output_initializer: Initializer,
    /// The module's path in the model.
    pub path: Option<String>,
}

impl SelfAttentionConfig {
    /// Builds this rank's heads.
    ///
    /// # Errors
    /// The ranks do not divide the heads; see also [`ParallelLinearConfig::init`].
    pub fn init(&self, group: &Group, device: &Device) -> Result<SelfAttention, ParallelError> {
        let Self {
            d_model,
            num_heads,
            num_kv_heads,
            head_dim,
            sequence_parallel,
            ..
        } = *self;
        let ranks = group.size();
        if num_kv_heads == 0 || !num_heads.is_multiple_of(num_kv_heads.max(ranks)) {
            let why = format!(
                "{num_heads} heads are not divisible by {num_kv_heads} key/value heads and \
                {ranks} tensor-parallel ranks"
            );
            let name = self.path.clone().unwrap_or_else(|| "unnamed".into());
            return Err(ParallelError::Config {
                layer: "SelfAttention",
                name,
                why,
            });
        }
        let heads = |count| FusedPart::units(count, head_dim);
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
            // Each rank normalizes its own heads, so the gradient of the scale is a sum over ranks.
            let config = NormConfig::rms(head_dim).with_sequence_parallel(true);
            self.qk_norm
                .map(|epsilon| config.with_epsilon(epsilon).init(group, device))
        };
        let of_rank = [num_heads / ranks, (num_kv_heads / ranks).max(1)];
        let mask = Mask {
            causal: self.causal,
            window: self.window,
            ..Mask::default()
        };
        Ok(SelfAttention {
            qkv: layer(qkv, "qkv")?,
            q_norm: head_norm(),
            k_norm: head_norm(),
            output: layer(output, "output")?,
            heads: of_rank,
            head_dim,
            core: CoreAttention::new("SelfAttention", of_rank, mask),
        })
    }
}

/// Self-attention with grouped queries, causal by default, its heads split over a group.
///
/// Source: Vaswani et al. (2017); Ainslie et al. (2023) for grouped queries; Su et al. (2021) for
/// rotary positions.
/// # Collective
/// As a column and a row [`ParallelLinear`]. Norms of queries and keys add an all-reduce of the
/// gradients of their scales to the backward pass.
#[derive(Module, Debug)]
pub struct SelfAttention {
    /// The QKV projection of this rank's heads, `[d_model, (q + 2 kv) head_dim]`.
    pub qkv: ParallelLinear,
    /// The norm over each query head.
    pub q_norm: Option<Norm>,
    /// The norm over each key head.
    pub k_norm: Option<Norm>,
    /// The output projection, `[q head_dim, d_model]`.
    pub output: ParallelLinear,
    /// Query heads and key/value heads of this rank.
    #[module(skip)]
    heads: [usize; 2],
    head_dim: usize,
    core: CoreAttention,
}

impl SelfAttention {
    /// Whether backward recomputes the core of attention from queries, keys and values instead of
    /// keeping its scores (Megatron's `core_attn`). The fused GPU kernels never store the scores,
    /// so there it saves only four bytes per head and token. Off by default.
    #[must_use]
    pub fn with_recompute(self, recompute: bool) -> Self {
        Self {
            core: self.core.with_recompute(recompute),
            ..self
        }
    }

    /// Drops this share of the attention probabilities in training. `name`, the module's path in
    /// the model, keys the masks; `group` is the one over which the heads are split.
    ///
    /// # Errors
    /// `prob` is outside of `[0, 1)`.
    pub fn with_dropout(self, prob: f64, name: &str, group: &Group) -> Result<Self, ParallelError> {
        Ok(Self {
            core: self.core.with_dropout(prob, name, group)?,
            ..self
        })
    }

    /// Shares each sequence with the ranks of `parallel`. Each rank holds two
    /// [chunks](megaburn_mesh::Zigzag) of it. `name`, the module's path in the model, is for error
    /// messages.
    ///
    /// # Errors
    /// The heads are exchanged and the ranks do not divide them.
    /// # Collective
    /// Nothing is sent. Forward and backward then send as [`ContextComm`](crate::ContextComm) says.
    pub fn with_context_parallel(
        self,
        parallel: &ContextParallel,
        name: &str,
    ) -> Result<Self, ParallelError> {
        Ok(Self {
            core: self.core.with_context_parallel(parallel, name)?,
            ..self
        })
    }

    /// Applies the attention to full sequences.
    ///
    /// # Shapes
    /// `[seq, batch, d_model]`, unchanged (with sequence or context parallelism `seq` is the local
    /// length). `rope` holds all positions of the tensor-parallel group; it is `None` where the
    /// model has learned positions.
    pub fn forward(&self, x: impl Into<Recomputable<3>>, rope: Option<&RopeTable>) -> Tensor<3> {
        self.forward_in(x, &TokenContext::new(rope.cloned()))
    }

    /// Like [`forward`](Self::forward), with more known about the tokens: in training some
    /// probabilities are dropped, and packed documents do not attend to each other.
    ///
    /// # Shapes
    /// As [`forward`](Self::forward).
    pub fn forward_in(&self, x: impl Into<Recomputable<3>>, context: &TokenContext) -> Tensor<3> {
        let queries_keys_values = self.queries_keys_values(x, context.rope.as_ref());
        self.output
            .forward(self.core.forward(queries_keys_values, context))
    }

    /// Applies the attention to the next tokens of some sequences. `cache` holds the earlier keys
    /// and values and receives the new ones. Not for training.
    ///
    /// # Shapes
    /// `[rows, 1, d_model]`, unchanged: the tokens of `packed` that this rank reads; `rope` holds
    /// their positions. The layer must be without sequence parallelism.
    /// # Collective
    /// As [`forward`](Self::forward) on full sequences; ranks that share the pass also all-gather
    /// keys and values.
    pub fn forward_cached(
        &self,
        x: impl Into<Recomputable<3>>,
        rope: Option<&RopeTable>,
        packed: &Packed,
        cache: &mut KvCache,
    ) -> Tensor<3> {
        let queries_keys_values = self.queries_keys_values(x, rope);
        self.output
            .forward(self.core.cached(queries_keys_values, packed, cache))
    }

    /// Returns the layer with the same weights for full sequences, as generation needs it.
    pub fn whole_sequence(self) -> Self {
        let Self {
            qkv, output, core, ..
        } = self;
        let qkv = qkv.whole_sequence();
        let output = output.whole_sequence();
        let core = core.whole_sequence();
        Self {
            qkv,
            output,
            core,
            ..self
        }
    }

    /// The queries, keys and values after norm and rotation, `[seq, batch, heads, head_dim]` each.
    fn queries_keys_values(
        &self,
        x: impl Into<Recomputable<3>>,
        rope: Option<&RopeTable>,
    ) -> [Tensor<4>; 3] {
        let qkv = self.qkv.forward(x);
        let [seq, batch, _] = qkv.dims();
        let [heads, kv_heads] = self.heads;
        let counts = [heads, kv_heads, kv_heads];
        // Backward reads the values, and the rotated copies of queries and keys. A view of the
        // values would keep the unrotated queries and keys alive as well. With norms there is
        // nothing to save: they keep their inputs anyway.
        let alone = rope.is_some() && self.q_norm.is_none() && qkv.device().is_autodiff();
        let cuts = [
            SliceMode::View,
            SliceMode::View,
            if alone {
                SliceMode::Copy
            } else {
                SliceMode::View
            },
        ];
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
