use burn::{config::Config, nn::Initializer, prelude::Device, tensor::Tensor};
use megaburn_collective::Group;
use megaburn_kernels::{
    AttentionKernel, RopeTable, SliceMode, repeat_heads, split_last, split_last_with,
};

use super::{
    Attention, AttentionGroups,
    core_config::CoreConfig,
    heads::{Heads, LatentHeads, rotated},
};
use crate::{
    context::Mask,
    error::ParallelError,
    init::named,
    linear::{
        LinearPrecision, ParallelLinear, ParallelLinearConfig, ReplicatedLinear,
        ReplicatedLinearConfig,
    },
    max_logits::MaxLogits,
    norm::{Norm, NormConfig},
    recomputable::Recomputable,
};

/// Configuration of an [`Attention`] with latents: multi-head latent attention (MLA), under Hugging
/// Face's names. Keys and values of all heads are projected from one small latent per token; queries
/// optionally have a latent too. Part of the query and key features are rotated; the rotated part of
/// the keys is shared by all heads.
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
/// ```
/// use burn::prelude::Device;
/// use megaburn_collective::Group;
/// use megaburn_parallel::MultiLatentAttentionConfig;
///
/// // An eighth of DeepSeek-V2-Lite, whose queries have no latent.
/// let config = MultiLatentAttentionConfig::new(256, 2, 64, 16, 8, 16).with_name("attention");
/// let layer = config.init(&Group::single(0), &Device::flex())?;
/// assert!(layer.q.is_some() && layer.q_down.is_none());
/// assert_eq!(layer.kv_up.unwrap().weight.dims(), [64, 2 * (16 + 16)]);
/// # Ok::<_, megaburn_parallel::ParallelError>(())
/// ```
#[derive(Config, Debug)]
pub struct MultiLatentAttentionConfig {
    /// Features of the residual stream.
    pub d_model: usize,
    /// Number of heads.
    pub num_heads: usize,
    /// Features of the latent of keys and values.
    pub kv_lora_rank: usize,
    /// Features of a head's queries and keys that are not rotated.
    pub qk_nope_head_dim: usize,
    /// Rotated features of a head's queries, and of the key part that all heads share.
    pub qk_rope_head_dim: usize,
    /// Features of a head's values.
    pub v_head_dim: usize,
    /// Features of the latent of queries; `None` projects queries from the residual stream
    /// directly.
    pub q_lora_rank: Option<usize>,
    /// Epsilon of the RMS norms of latents.
    #[config(default = 1e-6)]
    pub norm_epsilon: f64,
    /// Whether a query attends to no later position.
    #[config(default = true)]
    pub causal: bool,
    /// Factor of the scores; `None` means `1 / sqrt(qk_nope_head_dim + qk_rope_head_dim)`. DeepSeek
    /// with YaRN multiplies that by [`score_factor`](megaburn_kernels::YarnScaling::score_factor).
    pub softmax_scale: Option<f64>,
    /// Share of the attention probabilities that are dropped in training. The module's path keys
    /// the masks.
    #[config(default = 0.0)]
    pub dropout: f64,
    /// Whether backward recomputes the core of attention; see
    /// [`SelfAttentionConfig::recompute`](super::SelfAttentionConfig::recompute).
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
    /// Initializer of all matrices except the output projection.
    #[config(default = "Initializer::Normal { mean: 0.0, std: 0.02 }")]
    pub initializer: Initializer,
    /// Initializer of the output projection.
    #[config(default = "Initializer::Normal { mean: 0.0, std: 0.02 }")]
    pub output_initializer: Initializer,
    /// The module's path in the model.
    pub path: Option<String>,
}

named!(MultiLatentAttentionConfig);

impl MultiLatentAttentionConfig {
    /// Builds this rank's heads and its copies of the down projections.
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
            kv_lora_rank,
            v_head_dim,
            ..
        } = *self;
        let nope = self.qk_nope_head_dim;
        let rope = self.qk_rope_head_dim;
        if num_heads == 0 || !num_heads.is_multiple_of(group.size()) {
            let why = format!(
                "{num_heads} heads are not divisible by {} tensor-parallel ranks",
                group.size()
            );
            let name = self.path.clone().unwrap_or_else(|| "unnamed".into());
            return Err(ParallelError::Config {
                layer: LAYER,
                name,
                why,
            });
        }
        let parts = MlaBuilder {
            config: self,
            group,
            device,
        };
        let queries = num_heads * (nope + rope);
        let (q_down, q_norm, q_up, q) = match self.q_lora_rank {
            Some(rank) => (
                Some(parts.down("q_down", rank)?),
                Some(parts.norm(rank)),
                Some(parts.up("q_up", [rank, queries])?),
                None,
            ),
            None => (None, None, None, Some(parts.up("q", [d_model, queries])?)),
        };
        let heads = num_heads / group.size();
        let mask = Mask {
            causal: self.causal,
            scale: self.softmax_scale,
            kernel: self.kernel,
            ..Mask::default()
        };
        let first = group.rank() * heads;
        let max_logits = self
            .record_max_logits
            .then(|| MaxLogits::new(first, num_heads, nope + rope));
        let core = CoreConfig {
            layer: LAYER,
            path: self.path.as_deref(),
            heads: [heads, heads],
            mask,
            recompute: self.recompute,
            dropout: self.dropout,
            relative_bias: false,
            max_logits,
        };
        let kv_up = parts.up("kv_up", [kv_lora_rank, num_heads * (nope + v_head_dim)])?;
        let output = parts.output("output", num_heads * v_head_dim)?;
        let heads = LatentHeads {
            count: heads,
            nope,
            rope,
            values: v_head_dim,
            group: group.clone(),
            sequence_parallel: self.sequence_parallel,
        };
        Ok(Attention {
            q_down,
            q_norm,
            q_up,
            q,
            kv_down: Some(parts.down("kv_down", kv_lora_rank + rope)?),
            kv_norm: Some(parts.norm(kv_lora_rank)),
            kv_up: Some(kv_up),
            ..Attention::new(output, Heads::Latent(heads), core.init(&groups)?)
        })
    }
}

const LAYER: &str = "MultiLatentAttention";

/// Builds the layer's parts from their common settings.
struct MlaBuilder<'a> {
    config: &'a MultiLatentAttentionConfig,
    group: &'a Group,
    device: &'a Device,
}

impl MlaBuilder<'_> {
    fn path(&self, field: &str) -> Option<String> {
        self.config
            .path
            .as_ref()
            .map(|name| format!("{name}.{field}"))
    }

    /// A down projection from the residual stream to a latent.
    fn down(&self, field: &str, d_output: usize) -> Result<ReplicatedLinear, ParallelError> {
        let mut config = ReplicatedLinearConfig::new(self.config.d_model, d_output)
            .with_sequence_parallel(self.config.sequence_parallel)
            .with_initializer(self.config.initializer.clone());
        config.path = self.path(field);
        config.precision = self.config.precision;
        config.init(self.group, self.device)
    }

    /// The RMS norm of a latent.
    fn norm(&self, features: usize) -> Norm {
        NormConfig::rms(features)
            .with_epsilon(self.config.norm_epsilon)
            .with_sequence_parallel(self.config.sequence_parallel)
            .init(self.group, self.device)
    }

    /// An up projection to this rank's heads.
    fn up(
        &self,
        field: &str,
        [d_input, d_output]: [usize; 2],
    ) -> Result<ParallelLinear, ParallelError> {
        let config = ParallelLinearConfig::column(d_input, d_output)
            .with_initializer(self.config.initializer.clone());
        self.linear(field, config)
    }

    /// The output projection from this rank's heads.
    fn output(&self, field: &str, d_input: usize) -> Result<ParallelLinear, ParallelError> {
        let config = ParallelLinearConfig::row(d_input, self.config.d_model)
            .with_initializer(self.config.output_initializer.clone());
        self.linear(field, config)
    }

    fn linear(
        &self,
        field: &str,
        mut config: ParallelLinearConfig,
    ) -> Result<ParallelLinear, ParallelError> {
        config.path = self.path(field);
        config.precision = self.config.precision;
        config
            .with_bias(false)
            .with_sequence_parallel(self.config.sequence_parallel)
            .init(self.group, self.device)
    }
}

impl Attention {
    /// The queries, keys and values of latents after rotation:
    /// `[seq, batch, heads, nope + rope]` twice, and `[.., v]`.
    pub(super) fn project_latents(
        &self,
        plan: &LatentHeads,
        x: Recomputable<3>,
        rope: Option<&RopeTable>,
    ) -> [Tensor<4>; 3] {
        let (Some(kv_down), Some(kv_norm), Some(kv_up)) =
            (&self.kv_down, &self.kv_norm, &self.kv_up)
        else {
            unreachable!("latents of keys and values have all their layers");
        };
        let LatentHeads {
            count: heads,
            nope,
            rope: rope_dim,
            values,
            ..
        } = *plan;
        let queries = self.latent_queries(x.clone());
        let [seq, batch, _] = queries.dims();
        let queries = queries.reshape([seq, batch, heads, nope + rope_dim]);
        let [q, q_rope] = split_last(queries, [nope, rope_dim]);

        let latent = kv_down.forward(x);
        let of_latent = latent.dims()[2] - rope_dim;
        let [latent, k_rope] = split_last(latent, [of_latent, rope_dim]);
        let keys_values = kv_up.forward(kv_norm.forward(latent));
        let keys_values = keys_values.reshape([seq, batch, heads, nope + values]);
        // Backward reads the values. A view would keep the adjacent keys alive too, which backward
        // does not read: it reads their rotated copy.
        let cut = if keys_values.device().is_autodiff() {
            SliceMode::Copy
        } else {
            SliceMode::View
        };
        let [k, v] = split_last_with(keys_values, [nope, values], [SliceMode::View, cut]);
        let k_rope = plan
            .for_all_heads(k_rope)
            .reshape([seq, batch, 1, rope_dim]);
        let k_rope = repeat_heads(rotated(k_rope, rope), heads);
        let with_rope = |x: Tensor<4>, x_rope: Tensor<4>| Tensor::cat(vec![x, x_rope], 3);
        [with_rope(q, rotated(q_rope, rope)), with_rope(k, k_rope), v]
    }

    /// The queries of latents, `[seq, batch, heads * (nope + rope)]`, before rotation.
    fn latent_queries(&self, x: Recomputable<3>) -> Tensor<3> {
        let x = match (&self.q_down, &self.q_norm) {
            (Some(down), Some(norm)) => norm.forward(down.forward(x)).into(),
            _ => x,
        };
        let up = self.q_up.as_ref().or(self.q.as_ref());
        up.expect("either q_up or q is present").forward(x)
    }
}
