use burn::{config::Config, nn::Initializer, prelude::Device, tensor::Tensor};
use megaburn_kernels::{
    AttentionKernel, FoundAmax, SliceMode, split_heads, split_heads_observed, split_last_with,
};
use megaburn_mesh::FusedPart;

use super::{
    Alibi, Attention, AttentionGroups, PositionTables,
    core_config::CoreConfig,
    heads::{AlibiHeads, GroupedHeads, Heads, rotated},
    qk_norm::{QkNorm, l2_normed},
    sinks::init_sinks,
};
use crate::{
    context::Mask,
    error::ParallelError,
    init::named,
    linear::{LinearPrecision, ParallelLinearConfig},
    max_logits::MaxLogits,
    norm::Norm,
    recomputable::Recomputable,
};

/// Configuration of an [`Attention`] with grouped queries, causal by default.
///
/// Source: Vaswani et al. (2017); Ainslie et al. (2023) for grouped queries; Su et al. (2021) for
/// rotary positions.
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
    /// RMS norms of queries and keys before the rotation; `None` has no such norms.
    pub qk_norm: Option<QkNorm>,
    /// Factor of the scores; `None` means `1 / sqrt(head_dim)`.
    pub softmax_scale: Option<f64>,
    /// Scores are `cap * tanh(score / cap)` before the softmax (Gemma 2); `None` leaves them as
    /// they are.
    pub soft_cap: Option<f64>,
    /// ALiBi: scores fall with the distance between query and key. The layer is then given the
    /// positions of its keys. `None` has no such bias.
    pub alibi: Option<Alibi>,
    /// Whether scores have a bias by the distance of query and key (T5). The layer is then given the
    /// line of a [`RelativeBias`](super::RelativeBias), which layers share. Not with context
    /// parallelism, nor with sinks.
    #[config(default = false)]
    pub relative_bias: bool,
    /// Whether each query head has a learned logit that takes part in its softmax without a value
    /// (gpt-oss; Megatron's `--softmax-type learnable`). The output is scaled after the kernel of
    /// attention, whichever it is.
    #[config(default = false)]
    pub sinks: bool,
    /// Whether a query attends to no later position.
    #[config(default = true)]
    pub causal: bool,
    /// Sliding window: a query attends to this many positions, its own being the last; `None` means
    /// all.
    pub window: Option<usize>,
    /// Share of the attention probabilities that are dropped in training. The module's path keys
    /// the masks.
    #[config(default = 0.0)]
    pub dropout: f64,
    /// Whether backward recomputes the core of attention from queries, keys and values instead of
    /// keeping its scores (Megatron's `core_attn`). The fused GPU kernels never store the scores,
    /// so there it saves only four bytes per head and token.
    #[config(default = false)]
    pub recompute: bool,
    /// Whether training records the [largest attention logit](Attention::take_max_logits) of each
    /// head. It computes the products of queries and keys a second time, without keeping them.
    #[config(default = false)]
    pub record_max_logits: bool,
    /// The implementation of the core of attention.
    #[config(default = "AttentionKernel::Auto")]
    pub kernel: AttentionKernel,
    /// Whether input and output are sharded along the sequence.
    #[config(default = false)]
    pub sequence_parallel: bool,
    /// How the matrices of the projections are quantised for their products; `None` multiplies them
    /// as they are.
    pub precision: Option<LinearPrecision>,
    /// Initializer of the query, key and value matrices.
    #[config(default = "Initializer::Normal { mean: 0.0, std: 0.02 }")]
    pub initializer: Initializer,
    /// Initializer of the sinks.
    #[config(default = "Initializer::Normal { mean: 0.0, std: 0.02 }")]
    pub sinks_initializer: Initializer,
    /// Initializer of the output projection.
    #[config(default = "Initializer::Normal { mean: 0.0, std: 0.02 }")]
    pub output_initializer: Initializer,
    /// The module's path in the model.
    pub path: Option<String>,
}

named!(SelfAttentionConfig);

impl SelfAttentionConfig {
    /// Builds this rank's heads.
    ///
    /// # Errors
    /// The ranks do not divide the heads, or `dropout` is outside of `[0, 1)` or without a path;
    /// see also [`ParallelLinearConfig::init`].
    /// # Collective
    /// Nothing is sent.
    pub fn init(
        &self,
        groups: impl Into<AttentionGroups>,
        device: &Device,
    ) -> Result<Attention, ParallelError> {
        let groups = groups.into();
        let group = &groups.tp;
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
                layer: LAYER,
                name,
                why,
            });
        }
        let shared = groups.cp.num_ranks();
        let refused = [
            (
                shared > 1,
                format!(
                    "a relative bias does not support sequences that {shared} context-parallel \
                    ranks share: set cp = 1"
                ),
            ),
            (
                self.sinks,
                "a relative bias does not support attention sinks".into(),
            ),
        ];
        let refused = refused.into_iter().find(|(is_so, _)| *is_so);
        if let Some((_, why)) = refused.filter(|_| self.relative_bias) {
            let name = self.path.clone().unwrap_or_else(|| "unnamed".into());
            return Err(ParallelError::Config {
                layer: LAYER,
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
            config.precision = self.precision;
            config
                .with_bias_initializer(Some(Initializer::Zeros))
                .with_sequence_parallel(sequence_parallel)
                .init(group, device)
        };
        let qk_norm = |field: &str, count: usize| {
            let name = self.path.as_deref().unwrap_or("attention");
            let norm =
                |norm: &QkNorm| norm.init(heads(count), &format!("{name}.{field}"), group, device);
            self.qk_norm.as_ref().map(norm).transpose()
        };
        let of_rank = [num_heads / ranks, (num_kv_heads / ranks).max(1)];
        let scale = self.softmax_scale.unwrap_or((head_dim as f64).powf(-0.5));
        let first = group.rank() * of_rank[0];
        let alibi = self.alibi.map(|form| AlibiHeads {
            form,
            slopes: form.slopes(num_heads)[first..first + of_rank[0]].to_vec(),
            scale,
        });
        let mask = Mask {
            causal: self.causal,
            window: self.window,
            scale: match self.alibi {
                Some(_) => Some(scale),
                None => self.softmax_scale,
            },
            soft_cap: self.soft_cap,
            kernel: self.kernel,
            ..Mask::default()
        };
        let max_logits = self
            .record_max_logits
            .then(|| MaxLogits::new(first, num_heads, head_dim));
        let core = CoreConfig {
            layer: LAYER,
            path: self.path.as_deref(),
            heads: of_rank,
            mask,
            recompute: self.recompute,
            dropout: self.dropout,
            relative_bias: self.relative_bias,
            max_logits,
        };
        let core = core.init(&groups)?;
        let core = if self.sinks {
            let path = self.path.as_deref();
            let sinks = init_sinks(num_heads, &self.sinks_initializer, path, group, device)?;
            core.with_sinks(sinks, self.path.clone())
        } else {
            core
        };
        let grouped = GroupedHeads {
            count: of_rank,
            queries_per_key: num_heads / num_kv_heads,
            head_dim,
            alibi,
            norm_by_width: self.qk_norm.as_ref().is_some_and(QkNorm::is_by_width),
            l2_norm: self.qk_norm.as_ref().and_then(QkNorm::l2_epsilon),
        };
        Ok(Attention {
            qkv: Some(layer(qkv, "qkv")?),
            q_norm: qk_norm("q_norm", num_heads)?.flatten(),
            k_norm: qk_norm("k_norm", num_kv_heads)?.flatten(),
            ..Attention::new(layer(output, "output")?, Heads::Grouped(grouped), core)
        })
    }
}

const LAYER: &str = "SelfAttention";

impl Attention {
    /// The queries, keys and values of grouped queries after norm and rotation.
    pub(super) fn project_grouped(
        &self,
        heads: &GroupedHeads,
        x: Recomputable<3>,
        PositionTables {
            rope, alibi: keys, ..
        }: PositionTables<'_>,
    ) -> [Tensor<4>; 3] {
        let heads_alibi = heads.alibi.as_ref();
        let qkv = self.qkv.as_ref().expect("grouped queries have qkv");
        // The gradient that is assembled from those of queries, keys and values has its largest
        // magnitude found.
        let finds_amax = !heads.norm_by_width && qkv.needs_gradient_amax();
        let amax = finds_amax.then(FoundAmax::default);
        let qkv = qkv.forward(x.with_gradient_amax(amax.clone()));
        let [seq, batch, _] = qkv.dims();
        let GroupedHeads {
            count: [heads, kv_heads],
            head_dim,
            norm_by_width,
            l2_norm,
            ..
        } = *heads;
        let counts = [heads, kv_heads, kv_heads];
        // Backward reads the values, and the rotated copies of queries and keys. A view of the
        // values would keep the unrotated queries and keys alive as well. With norms there is
        // nothing to save: they keep their inputs anyway.
        let has_norms = self.q_norm.is_some() || l2_norm.is_some();
        let is_copied = rope.is_some() || heads_alibi.is_some();
        let alone = is_copied && !has_norms && qkv.device().is_autodiff();
        let cuts = [
            SliceMode::View,
            SliceMode::View,
            if alone {
                SliceMode::Copy
            } else {
                SliceMode::View
            },
        ];
        let normed = |x: Tensor<4>, norm: &Option<Norm>| match (norm, l2_norm) {
            (Some(norm), _) => norm.forward(x),
            (None, Some(epsilon)) => l2_normed(x, epsilon),
            (None, None) => x,
        };
        let [q, k, v] = if norm_by_width {
            let [q, k, v] = split_last_with(qkv, counts.map(|count| count * head_dim), cuts);
            let normed = |x, norm: &Option<Norm>| match norm {
                Some(norm) => norm.forward(x),
                None => x,
            };
            let [q, k] = [normed(q, &self.q_norm), normed(k, &self.k_norm)];
            [q, k, v].map(|x| {
                let count = x.dims()[2] / head_dim;
                x.reshape([seq, batch, count, head_dim])
            })
        } else {
            let [q, k, v] = match amax {
                Some(amax) => split_heads_observed(qkv, head_dim, counts, cuts, amax),
                None => split_heads(qkv, head_dim, counts, cuts),
            };
            [normed(q, &self.q_norm), normed(k, &self.k_norm), v]
        };
        let [q, k] = [rotated(q, rope), rotated(k, rope)];
        let [q, k] = match heads_alibi {
            Some(alibi) => alibi.widened(q, k, keys),
            None => [q, k],
        };
        [q, k, v]
    }
}
