mod config;

use burn::{module::Module, tensor::Tensor};
use megaburn_collective::{
    Group,
    region::{copy_to, gather_from_sequence},
};
use megaburn_kernels::{
    RopeTable, SliceMode, apply_rope, repeat_heads, split_last, split_last_with,
};

pub use config::MultiLatentAttentionConfig;

use super::core_attention::CoreAttention;
use crate::{
    ContextParallel, KvCache, Norm, Packed, ParallelError, ParallelLinear, PlanBuilder,
    Recomputable, ReplicatedLinear, Sharded, TokenContext,
};

/// Multi-head latent attention (MLA). Keys and values of all heads are projected from one small
/// latent per token; queries optionally have a latent too. Part of the query and key features are
/// rotated; the rotated part of the keys is shared by all heads.
///
/// ```text
/// q = q_up(q_norm(q_down(x)))              or q(x)
/// [latent | k_rope] = kv_down(x)
/// [k | v] = kv_up(kv_norm(latent))         of each head
/// output(attention([q | rotated q_rope], [k | rotated k_rope], v))
/// ```
///
/// The heads are split over a group. The down projections and the norms of the latents are
/// replicated: latents are small, and every head reads all of them. DeepSeek's checkpoints store
/// rotated features in adjacent pairs. Use the layout
/// [`Interleaved`](megaburn_kernels::RopeLayout::Interleaved) for the rope table, and their weights
/// load unchanged.
///
/// Value heads may be smaller than key heads: no kernel of [`attention`] pads them.
///
/// [`attention`]: megaburn_kernels::attention
///
/// Source: DeepSeek-AI (2024), "DeepSeek-V2", <https://arxiv.org/abs/2405.04434>, section 2.1;
/// Hugging Face's `DeepseekV3Attention`; Megatron-LM
/// `megatron/core/transformer/multi_latent_attention.py`.
///
/// # Collective
/// Forward: one all-reduce of the output. Backward: one all-reduce for the gradient of each
/// normalized latent, and one for the gradient of the keys' rotated features.
///
/// With sequence parallelism each rank computes the latents of its own tokens.
///
/// - Forward: the normalized latents and the keys' rotated features are all-gathered (without a
///   query latent, the input instead), and the output is reduce-scattered.
/// - Backward: runs the adjoint collectives, gathers the inputs of the up projections a second time
///   for their weight gradients, and all-reduces the gradients of all replicated parameters.
#[derive(Module, Debug)]
pub struct MultiLatentAttention {
    /// The query down projection, `[d_model, q_lora_rank]` (`q_a_proj`).
    pub q_down: Option<ReplicatedLinear>,
    /// The norm of the query latent (`q_a_layernorm`).
    pub q_norm: Option<Norm>,
    /// The query up projection to this rank's heads, each `[nope | rope]` (`q_b_proj`).
    pub q_up: Option<ParallelLinear>,
    /// The query projection from the residual stream, where queries have no latent (`q_proj`).
    pub q: Option<ParallelLinear>,
    /// The projection to the latent of keys and values and to the keys' rotated features,
    /// `[d_model, kv_lora_rank + rope]` (`kv_a_proj_with_mqa`).
    pub kv_down: ReplicatedLinear,
    /// The norm of the key/value latent (`kv_a_layernorm`).
    pub kv_norm: Norm,
    /// The up projection to keys and values of this rank's heads, each `[nope | v]` (`kv_b_proj`).
    pub kv_up: ParallelLinear,
    /// The output projection (`o_proj`).
    pub output: ParallelLinear,
    #[module(skip)]
    plan: LatentPlan,
    core: CoreAttention,
}

#[derive(Clone, Debug)]
struct LatentPlan {
    /// Heads of this rank.
    heads: usize,
    /// Features of a head's queries and keys that are not rotated, and that are rotated.
    nope: usize,
    rope: usize,
    /// Features of a head's values.
    values: usize,
    group: Group,
    sequence_parallel: bool,
}

impl MultiLatentAttention {
    /// See [`SelfAttention::with_recompute`](crate::SelfAttention::with_recompute).
    #[must_use]
    pub fn with_recompute(self, recompute: bool) -> Self {
        Self {
            core: self.core.with_recompute(recompute),
            ..self
        }
    }

    /// See [`SelfAttention::with_dropout`](crate::SelfAttention::with_dropout).
    ///
    /// # Errors
    /// `prob` is outside of `[0, 1)`.
    pub fn with_dropout(self, prob: f64, name: &str, group: &Group) -> Result<Self, ParallelError> {
        Ok(Self {
            core: self.core.with_dropout(prob, name, group)?,
            ..self
        })
    }

    /// See [`SelfAttention::with_context_parallel`](crate::SelfAttention::with_context_parallel).
    /// Ranks exchange keys and values per head, not latents.
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
    /// length). `rope` is for heads of `qk_rope_head_dim` and holds all positions of the
    /// tensor-parallel group; `None` rotates nothing.
    pub fn forward(&self, x: impl Into<Recomputable<3>>, rope: Option<&RopeTable>) -> Tensor<3> {
        self.forward_in(x, &TokenContext::new(rope.cloned()))
    }

    /// Like [`forward`](Self::forward), with more known about the tokens: in training some
    /// probabilities are dropped, and packed documents do not attend to each other.
    ///
    /// # Shapes
    /// As [`forward`](Self::forward).
    pub fn forward_in(&self, x: impl Into<Recomputable<3>>, context: &TokenContext) -> Tensor<3> {
        let queries_keys_values = self.queries_keys_values(x.into(), context.rope.as_ref());
        self.output
            .forward(self.core.forward(queries_keys_values, context))
    }

    /// Applies the attention to the next tokens of some sequences. `cache` holds the earlier keys
    /// and values and receives the new ones. It stores the keys and values of this rank's heads, so
    /// it is as large as without latents. Not for training.
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
        let queries_keys_values = self.queries_keys_values(x.into(), rope);
        self.output
            .forward(self.core.cached(queries_keys_values, packed, cache))
    }

    /// Returns the layer with the same weights for full sequences, as generation needs it.
    pub fn whole_sequence(self) -> Self {
        Self {
            q_down: self.q_down.map(ReplicatedLinear::whole_sequence),
            q_norm: self.q_norm.map(Norm::whole_sequence),
            q_up: self.q_up.map(ParallelLinear::whole_sequence),
            q: self.q.map(ParallelLinear::whole_sequence),
            kv_down: self.kv_down.whole_sequence(),
            kv_norm: self.kv_norm.whole_sequence(),
            kv_up: self.kv_up.whole_sequence(),
            output: self.output.whole_sequence(),
            plan: LatentPlan {
                sequence_parallel: false,
                ..self.plan
            },
            core: self.core.whole_sequence(),
        }
    }

    /// The queries, keys and values of this rank's heads after rotation:
    /// `[seq, batch, heads, nope + rope]` twice, and `[.., v]`.
    fn queries_keys_values(&self, x: Recomputable<3>, rope: Option<&RopeTable>) -> [Tensor<4>; 3] {
        let LatentPlan {
            heads,
            nope,
            rope: rotated,
            values,
            ..
        } = self.plan;
        let rotate = |x: Tensor<4>| rope.into_iter().fold(x, apply_rope);
        let queries = self.queries(x.clone());
        let [seq, batch, _] = queries.dims();
        let queries = queries.reshape([seq, batch, heads, nope + rotated]);
        let [q, q_rope] = split_last(queries, [nope, rotated]);

        let latent = self.kv_down.forward(x);
        let of_latent = latent.dims()[2] - rotated;
        let [latent, k_rope] = split_last(latent, [of_latent, rotated]);
        let keys_values = self.kv_up.forward(self.kv_norm.forward(latent));
        let keys_values = keys_values.reshape([seq, batch, heads, nope + values]);
        // Backward reads the values. A view would keep the adjacent keys alive too, which backward
        // does not read: it reads their rotated copy.
        let cut = if keys_values.device().is_autodiff() {
            SliceMode::Copy
        } else {
            SliceMode::View
        };
        let [k, v] = split_last_with(keys_values, [nope, values], [SliceMode::View, cut]);
        let k_rope = self.for_all_heads(k_rope).reshape([seq, batch, 1, rotated]);
        let k_rope = repeat_heads(rotate(k_rope), heads);
        let with_rotated = |x: Tensor<4>, rotated: Tensor<4>| Tensor::cat(vec![x, rotated], 3);
        [with_rotated(q, rotate(q_rope)), with_rotated(k, k_rope), v]
    }

    /// The queries of this rank's heads, `[seq, batch, heads * (nope + rope)]`, before rotation.
    fn queries(&self, x: Recomputable<3>) -> Tensor<3> {
        let x = match (&self.q_down, &self.q_norm) {
            (Some(down), Some(norm)) => norm.forward(down.forward(x)).into(),
            _ => x,
        };
        let up = self.q_up.as_ref().or(self.q.as_ref());
        up.expect("either q_up or q is present").forward(x)
    }

    /// Makes `x` an input of every rank's heads, for all tokens, like the input of a column split.
    fn for_all_heads(&self, x: Tensor<3>) -> Tensor<3> {
        let LatentPlan {
            group,
            sequence_parallel,
            ..
        } = &self.plan;
        if *sequence_parallel {
            gather_from_sequence(x, group)
        } else {
            copy_to(x, group)
        }
    }
}

impl Sharded for MultiLatentAttention {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.child("q_down", &self.q_down);
        plan.child("q_norm", &self.q_norm);
        plan.child("q_up", &self.q_up);
        plan.child("q", &self.q);
        plan.child("kv_down", &self.kv_down);
        plan.child("kv_norm", &self.kv_norm);
        plan.child("kv_up", &self.kv_up);
        plan.child("output", &self.output);
    }
}
