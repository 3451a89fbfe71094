//! Attention of a decoder's positions to the output of an encoder.

use burn::{config::Config, module::Module, nn::Initializer, prelude::Device, tensor::Tensor};
use megaburn_kernels::{AttentionKernel, SliceMode, split_heads};
use megaburn_mesh::FusedPart;

use super::{AttentionGroups, core_attention::CoreAttention, core_config::CoreConfig};
use crate::{
    context::Mask,
    error::ParallelError,
    init::named,
    kv_cache::{KvCache, Packed},
    linear::{LinearPrecision, ParallelLinear, ParallelLinearConfig, PrecisionScope},
    recomputable::Recomputable,
    shards::Sharded,
    tokens::BatchContext,
};

/// Configuration of a [`CrossAttention`].
///
/// Source: Vaswani et al. (2017); Megatron-LM `megatron/core/transformer/attention.py`,
/// `CrossAttention`.
#[derive(Config, Debug)]
pub struct CrossAttentionConfig {
    /// Features of the residual stream, and of the encoder's output.
    pub d_model: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Key/value heads; `None` means as many as query heads. If there are fewer than ranks, they are
    /// replicated.
    pub num_kv_heads: Option<usize>,
    /// Whether queries, keys and values have biases.
    #[config(default = false)]
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    #[config(default = false)]
    pub output_bias: bool,
    /// Factor of the scores; `None` means `1 / sqrt(head_dim)`.
    pub softmax_scale: Option<f64>,
    /// Share of the attention probabilities that are dropped in training. The module's path keys
    /// the masks.
    #[config(default = 0.0)]
    pub dropout: f64,
    /// Whether backward recomputes the core of attention from queries, keys and values instead of
    /// keeping its scores.
    #[config(default = false)]
    pub recompute: bool,
    /// The implementation of the core of attention.
    #[config(default = "AttentionKernel::Auto")]
    pub kernel: AttentionKernel,
    /// Whether the input, the encoder's output and the result are sharded along the sequence.
    #[config(default = false)]
    pub sequence_parallel: bool,
    /// How the matrices of the projections are quantised for their products; `None` multiplies them
    /// as they are.
    pub precision: Option<LinearPrecision>,
    /// Initializer of the query, key and value matrices.
    #[config(default = "Initializer::Normal { mean: 0.0, std: 0.02 }")]
    pub initializer: Initializer,
    /// Initializer of the output projection.
    #[config(default = "Initializer::Normal { mean: 0.0, std: 0.02 }")]
    pub output_initializer: Initializer,
    /// The module's path in the model.
    pub path: Option<String>,
}

named!(CrossAttentionConfig);

const LAYER: &str = "CrossAttention";

impl CrossAttentionConfig {
    /// Builds this rank's heads.
    ///
    /// # Errors
    /// The ranks do not divide the heads, ranks share sequences (context parallelism), or `dropout`
    /// is outside of `[0, 1)` or without a path; see also [`ParallelLinearConfig::init`].
    /// # Collective
    /// Nothing is sent.
    pub fn init(
        &self,
        groups: impl Into<AttentionGroups>,
        device: &Device,
    ) -> Result<CrossAttention, ParallelError> {
        let groups = groups.into();
        let ranks = groups.tp.size();
        let Self {
            d_model,
            num_heads,
            head_dim,
            ..
        } = *self;
        let num_kv_heads = self.num_kv_heads.unwrap_or(num_heads);
        let refuse = |why: String| ParallelError::Config {
            layer: LAYER,
            name: self.path.clone().unwrap_or_else(|| "unnamed".into()),
            why,
        };
        if num_kv_heads == 0 || !num_heads.is_multiple_of(num_kv_heads.max(ranks)) {
            return Err(refuse(format!(
                "{num_heads} heads are not divisible by {num_kv_heads} key/value heads and \
                {ranks} tensor-parallel ranks"
            )));
        }
        let shared = groups.cp.num_ranks();
        if shared > 1 {
            return Err(refuse(format!(
                "cross attention does not support sequences that {shared} context-parallel ranks \
                share: set cp = 1"
            )));
        }
        let heads = |count| FusedPart::units(count, head_dim);
        let column = |parts: Vec<FusedPart>, count: usize| {
            ParallelLinearConfig::column(d_model, count * head_dim)
                .with_parts(parts)
                .with_bias(self.qkv_bias)
                .with_initializer(self.initializer.clone())
        };
        let q = column(vec![heads(num_heads)], num_heads);
        let kv = column(vec![heads(num_kv_heads); 2], 2 * num_kv_heads);
        let output = ParallelLinearConfig::row(num_heads * head_dim, d_model)
            .with_bias(self.output_bias)
            .with_initializer(self.output_initializer.clone());
        let layer = |mut config: ParallelLinearConfig, field: &str| {
            config.path = self.path.as_ref().map(|name| format!("{name}.{field}"));
            config.precision = self.precision;
            config
                .with_bias_initializer(Some(Initializer::Zeros))
                .with_sequence_parallel(self.sequence_parallel)
                .init(&groups.tp, device)
        };
        let of_rank = [num_heads / ranks, (num_kv_heads / ranks).max(1)];
        let core = CoreConfig {
            layer: LAYER,
            path: self.path.as_deref(),
            heads: of_rank,
            mask: Mask {
                scale: self.softmax_scale,
                kernel: self.kernel,
                ..Mask::default()
            },
            recompute: self.recompute,
            dropout: self.dropout,
            relative_bias: false,
            max_logits: None,
        };
        Ok(CrossAttention {
            q: layer(q, "q")?,
            kv: layer(kv, "kv")?,
            output: layer(output, "output")?,
            head_dim,
            core: core.init(&groups)?,
        })
    }
}

/// Attention whose queries are of a decoder and whose keys and values are of an encoder's output,
/// the memory; its heads are split over a group.
///
/// # Collective
/// As two column and one row [`ParallelLinear`]: forward one all-reduce of the output, backward one
/// all-reduce of each input's gradient. With sequence parallelism input and memory are all-gathered
/// and the output is reduce-scattered; backward runs the adjoint collectives and gathers input and
/// memory a second time.
#[derive(Module, Sharded, Debug)]
pub struct CrossAttention {
    /// The query projection of this rank's heads, `[d_model, heads * head_dim / n]`.
    pub q: ParallelLinear,
    /// The key and value projection of this rank's heads, `[k | v]`,
    /// `[d_model, 2 * kv_heads * head_dim / n]`.
    pub kv: ParallelLinear,
    /// The output projection, `[heads * head_dim / n, d_model]`.
    pub output: ParallelLinear,
    head_dim: usize,
    core: CoreAttention,
}

impl CrossAttention {
    /// Attends to the memory. In training some probabilities are dropped. The padding of
    /// `batch.encoder` is not attended to.
    ///
    /// # Shapes
    /// - `x` and output: `[s_dec, batch, d_model]`; with sequence parallelism
    ///   `[s_dec / n, batch, d_model]`
    /// - `memory`: `[s_enc, batch, d_model]`, the same way
    ///
    /// # Panics
    /// If `batch.encoder` is of another length or batch than the memory, or ranks share the
    /// sequences of the batch.
    pub fn forward(
        &self,
        x: impl Into<Recomputable<3>>,
        memory: Tensor<3>,
        batch: &BatchContext,
    ) -> Tensor<3> {
        let q = self.by_head(self.q.forward(x));
        let [k, v] = self.keys_values(memory);
        self.output.forward(self.core.cross([q, k, v], batch))
    }

    /// The keys and values of this rank's heads, for [`forward_cached`](Self::forward_cached).
    ///
    /// # Shapes
    /// - `memory`: as in [`forward`](Self::forward)
    /// - output: `[s_enc, batch, kv_heads / n, head_dim]` each
    pub fn keys_values(&self, memory: Tensor<3>) -> [Tensor<4>; 2] {
        let kv = self.kv.forward(memory);
        let count = kv.dims()[2] / (2 * self.head_dim);
        split_heads(kv, self.head_dim, [count; 2], [SliceMode::View; 2])
    }

    /// Attends with the next tokens of some sequences. `memory` holds the
    /// [`keys_values`](Self::keys_values) of each sequence of the pass. Not for training.
    ///
    /// # Shapes
    /// `[rows, 1, d_model]`, unchanged: the tokens of `packed` that this rank reads. The layer must
    /// be without sequence parallelism.
    ///
    /// # Panics
    /// If a sequence has no keys and values in `memory`.
    pub fn forward_cached(
        &self,
        x: impl Into<Recomputable<3>>,
        packed: &Packed,
        memory: &KvCache,
    ) -> Tensor<3> {
        let q = self.by_head(self.q.forward(x));
        self.output
            .forward(self.core.cross_cached(q, packed, memory))
    }

    /// As [`ParallelLinear::in_scope`].
    pub fn in_scope(self, scope: &PrecisionScope) -> Self {
        Self {
            q: self.q.in_scope(scope),
            kv: self.kv.in_scope(scope),
            output: self.output.in_scope(scope),
            ..self
        }
    }

    /// Returns the layer with the same weights for full sequences, as generation needs it.
    pub fn whole_sequence(self) -> Self {
        Self {
            q: self.q.whole_sequence(),
            kv: self.kv.whole_sequence(),
            output: self.output.whole_sequence(),
            head_dim: self.head_dim,
            core: self.core.whole_sequence(),
        }
    }

    /// `[s, b, heads, head_dim]`, from `[s, b, heads * head_dim]`.
    fn by_head(&self, x: Tensor<3>) -> Tensor<4> {
        let [s, b, width] = x.dims();
        x.reshape([s, b, width / self.head_dim, self.head_dim])
    }
}
