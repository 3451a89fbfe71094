//! Attention with its heads split over a group: self-attention with grouped queries or with
//! latents, and cross attention to an encoder's output.

mod alibi;
mod core_attention;
mod core_config;
mod cross_attention;
mod groups;
mod heads;
mod latent;
mod position_tables;
mod probability_dropout;
mod qk_clip;
mod qk_norm;
mod relative_bias;
mod self_attention;
mod sinks;
mod whole_attention;

use crate::{
    kv_cache::{KvCache, Packed},
    linear::{ParallelLinear, PrecisionScope, ReplicatedLinear},
    norm::Norm,
    recomputable::Recomputable,
    shards::Sharded,
    tokens::BatchContext,
};
pub use alibi::{ALIBI_FEATURES, Alibi, AlibiKeys};
use burn::{module::Module, tensor::Tensor};
use core_attention::CoreAttention;
pub use cross_attention::{CrossAttention, CrossAttentionConfig};
pub use groups::AttentionGroups;
use heads::Heads;
pub use latent::MultiLatentAttentionConfig;
pub use position_tables::PositionTables;
pub use qk_clip::QkClip;
pub use qk_norm::{QkNorm, QkNormKind};
pub use relative_bias::{RelativeBias, RelativeBiasConfig};
pub use self_attention::SelfAttentionConfig;

/// Self-attention, its heads split over a group. [`SelfAttentionConfig`] builds it with grouped
/// queries, [`MultiLatentAttentionConfig`] with latents; each has its own projections to queries,
/// keys and values, and the fields of the other are `None`.
///
/// # Collective
/// Grouped queries: as a column and a row [`ParallelLinear`]. Norms of queries and keys add an
/// all-reduce of the gradients of their scales to the backward pass.
///
/// Latents, forward: one all-reduce of the output. Backward: one all-reduce for the gradient of
/// each normalized latent, and one for the gradient of the keys' rotated features.
///
/// With sequence parallelism each rank computes the latents of its own tokens.
///
/// - Forward: the normalized latents and the keys' rotated features are all-gathered (without a
///   query latent, the input instead), and the output is reduce-scattered.
/// - Backward: runs the adjoint collectives, gathers the inputs of the up projections a second time
///   for their weight gradients, and all-reduces the gradients of all replicated parameters.
///
/// Context-parallel ranks also send as [`ContextComm`](crate::ContextComm) says.
#[derive(Module, Sharded, Debug)]
pub struct Attention {
    /// Grouped queries: the QKV projection of this rank's heads, `[d_model, (q + 2 kv) head_dim]`.
    pub qkv: Option<ParallelLinear>,
    /// Latents: the query down projection, `[d_model, q_lora_rank]` (`q_a_proj`).
    pub q_down: Option<ReplicatedLinear>,
    /// The norm over each query head; with latents that of the query latent (`q_a_layernorm`).
    pub q_norm: Option<Norm>,
    /// The norm over each key head.
    pub k_norm: Option<Norm>,
    /// Latents: the query up projection to this rank's heads, each `[nope | rope]` (`q_b_proj`).
    pub q_up: Option<ParallelLinear>,
    /// Latents: the query projection from the residual stream, where queries have no latent
    /// (`q_proj`).
    pub q: Option<ParallelLinear>,
    /// The projection to the latent of keys and values and to the keys' rotated features,
    /// `[d_model, kv_lora_rank + rope]` (`kv_a_proj_with_mqa`).
    pub kv_down: Option<ReplicatedLinear>,
    /// The norm of the key/value latent (`kv_a_layernorm`).
    pub kv_norm: Option<Norm>,
    /// The up projection to keys and values of this rank's heads, each `[nope | v]` (`kv_b_proj`).
    pub kv_up: Option<ParallelLinear>,
    /// The output projection, `[heads * v, d_model]`.
    pub output: ParallelLinear,
    #[module(skip)]
    heads: Heads,
    core: CoreAttention,
}

impl Attention {
    /// A layer without projections to queries, keys and values.
    fn new(output: ParallelLinear, heads: Heads, core: CoreAttention) -> Self {
        Self {
            qkv: None,
            q_down: None,
            q_norm: None,
            k_norm: None,
            q_up: None,
            q: None,
            kv_down: None,
            kv_norm: None,
            kv_up: None,
            output,
            heads,
            core,
        }
    }

    /// Applies the attention to full sequences outside of training.
    ///
    /// # Shapes
    /// `[seq, batch, d_model]`, unchanged (with sequence or context parallelism `seq` is the local
    /// length). `positions` holds all positions of the tensor-parallel group, with latents for heads
    /// of `qk_rope_head_dim`; without a table, nothing is rotated.
    ///
    /// # Panics
    /// If the layer has ALiBi or a relative bias and `positions` does not, or if the relative bias is
    /// for fewer positions.
    pub fn forward<'a>(
        &self,
        x: impl Into<Recomputable<3>>,
        positions: impl Into<PositionTables<'a>>,
    ) -> Tensor<3> {
        self.forward_in(x, positions, &BatchContext::default())
    }

    /// Like [`forward`](Self::forward), with more known about the micro-batch: in training some
    /// probabilities are dropped, and packed documents do not attend to each other.
    ///
    /// # Shapes
    /// As [`forward`](Self::forward).
    ///
    /// # Panics
    /// As [`forward`](Self::forward).
    pub fn forward_in<'a>(
        &self,
        x: impl Into<Recomputable<3>>,
        positions: impl Into<PositionTables<'a>>,
        batch: &BatchContext,
    ) -> Tensor<3> {
        let positions = positions.into();
        let mut x = x.into();
        let of_result = x.take_gradient_amax();
        let queries_keys_values = self.queries_keys_values(x, positions);
        let attended = self
            .core
            .forward(queries_keys_values, positions.relative, batch);
        let attended = Recomputable::from(attended);
        self.output.forward(attended.with_gradient_amax(of_result))
    }

    /// Whether the layer needs the largest magnitude of its input, and whether the operation that
    /// writes the input can find it. Latents find it by themselves.
    pub fn needs_input_amax(&self) -> bool {
        self.qkv
            .as_ref()
            .is_some_and(ParallelLinear::needs_input_amax)
    }

    /// Whether the layer needs the largest magnitude of its result's gradient, and whether the
    /// operation that writes the gradient can find it.
    pub fn needs_gradient_amax(&self) -> bool {
        self.output.needs_gradient_amax()
    }

    /// Applies the attention to the next tokens of some sequences. `cache` holds the earlier keys
    /// and values of this rank's heads (not latents) and receives the new ones. Not for training.
    ///
    /// # Shapes
    /// `[rows, 1, d_model]`, unchanged: the tokens of `packed` that this rank reads; `positions`
    /// holds their positions. The layer must be without sequence parallelism.
    /// # Collective
    /// As [`forward`](Self::forward) on full sequences; ranks that share the pass also all-gather
    /// keys and values.
    ///
    /// # Panics
    /// As [`forward`](Self::forward).
    pub fn forward_cached<'a>(
        &self,
        x: impl Into<Recomputable<3>>,
        positions: impl Into<PositionTables<'a>>,
        packed: &Packed,
        cache: &mut KvCache,
    ) -> Tensor<3> {
        let positions = positions.into();
        let x = x.into().with_gradient_amax(None);
        let queries_keys_values = self.queries_keys_values(x, positions);
        let attended = self
            .core
            .cached(queries_keys_values, positions.relative, packed, cache);
        self.output.forward(attended)
    }

    /// The queries, keys and values of this rank's heads after norm and rotation,
    /// `[seq, batch, heads, head_dim]` each.
    fn queries_keys_values(
        &self,
        x: Recomputable<3>,
        positions: PositionTables<'_>,
    ) -> [Tensor<4>; 3] {
        match &self.heads {
            Heads::Grouped(heads) => self.project_grouped(heads, x, positions),
            Heads::Latent(heads) => self.project_latents(heads, x, positions.rope),
        }
    }

    /// As [`ParallelLinear::in_scope`].
    pub fn in_scope(self, scope: &PrecisionScope) -> Self {
        let split = |layer: Option<ParallelLinear>| layer.map(|layer| layer.in_scope(scope));
        let copied = |layer: Option<ReplicatedLinear>| layer.map(|layer| layer.in_scope(scope));
        Self {
            qkv: split(self.qkv),
            q_down: copied(self.q_down),
            q_up: split(self.q_up),
            q: split(self.q),
            kv_down: copied(self.kv_down),
            kv_up: split(self.kv_up),
            output: self.output.in_scope(scope),
            ..self
        }
    }

    /// Returns the layer with the same weights for full sequences, as generation needs it.
    pub fn whole_sequence(self) -> Self {
        Self {
            qkv: self.qkv.map(ParallelLinear::whole_sequence),
            q_down: self.q_down.map(ReplicatedLinear::whole_sequence),
            // A norm over heads has rows of its own on every rank, whatever the sequences are.
            q_norm: match self.heads {
                Heads::Grouped(_) => self.q_norm,
                Heads::Latent(_) => self.q_norm.map(Norm::whole_sequence),
            },
            k_norm: self.k_norm,
            q_up: self.q_up.map(ParallelLinear::whole_sequence),
            q: self.q.map(ParallelLinear::whole_sequence),
            kv_down: self.kv_down.map(ReplicatedLinear::whole_sequence),
            kv_norm: self.kv_norm.map(Norm::whole_sequence),
            kv_up: self.kv_up.map(ParallelLinear::whole_sequence),
            output: self.output.whole_sequence(),
            heads: match self.heads {
                Heads::Latent(heads) => Heads::Latent(heads.whole_sequence()),
                heads => heads,
            },
            core: self.core.whole_sequence(),
        }
    }
}
