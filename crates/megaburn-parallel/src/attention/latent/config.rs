use burn::{config::Config, nn::Initializer, prelude::Device};
use megaburn_collective::Group;

use super::{LatentPlan, MultiLatentAttention};
use crate::{
    Norm, NormConfig, ParallelError, ParallelLinear, ParallelLinearConfig, ReplicatedLinear,
    ReplicatedLinearConfig, attention::core_attention::CoreAttention, context::Mask,
};

/// Configuration of a [`MultiLatentAttention`], under Hugging Face's names.
///
/// ```
/// use burn::prelude::Device;
/// use megaburn_collective::Group;
/// use megaburn_parallel::MultiLatentAttentionConfig;
///
/// // An eighth of DeepSeek-V2-Lite, whose queries have no latent.
/// let config = MultiLatentAttentionConfig::new(256, 2, 64, 16, 8, 16).with_name("attention");
/// let layer = config.init(&Group::single(0), &Device::flex())?;
/// assert_eq!(layer.kv_down.weight.dims(), [256, 64 + 8]);
/// assert_eq!(layer.kv_up.weight.dims(), [64, 2 * (16 + 16)]);
/// assert!(layer.q.is_some() && layer.q_down.is_none());
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
    /// Whether input and output are sharded along the sequence.
    #[config(default = false)]
    pub sequence_parallel: bool,
    /// Initializer of all matrices except the output projection.
    #[config(default = "Initializer::Normal { mean: 0.0, std: 0.02 }")]
    pub initializer: Initializer,
    /// Initializer of the output projection.
    #[config(default = "Initializer::Normal { mean: 0.0, std: 0.02 }")]
    pub output_initializer: Initializer,
    /// The module's path in the model.
    pub path: Option<String>,
}

impl MultiLatentAttentionConfig {
    /// Builds this rank's heads and its copies of the down projections.
    ///
    /// # Errors
    /// The ranks do not divide the heads; see also [`ParallelLinearConfig::init`].
    /// # Collective
    /// Nothing is sent.
    pub fn init(
        &self,
        group: &Group,
        device: &Device,
    ) -> Result<MultiLatentAttention, ParallelError> {
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
            ..Mask::default()
        };
        Ok(MultiLatentAttention {
            q_down,
            q_norm,
            q_up,
            q,
            kv_down: parts.down("kv_down", kv_lora_rank + rope)?,
            kv_norm: parts.norm(kv_lora_rank),
            kv_up: parts.up("kv_up", [kv_lora_rank, num_heads * (nope + v_head_dim)])?,
            output: parts.output("output", num_heads * v_head_dim)?,
            plan: LatentPlan {
                heads,
                nope,
                rope,
                values: v_head_dim,
                group: group.clone(),
                sequence_parallel: self.sequence_parallel,
            },
            core: CoreAttention::new(LAYER, [heads, heads], mask),
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
        config
            .with_bias(false)
            .with_sequence_parallel(self.config.sequence_parallel)
            .init(self.group, self.device)
    }
}
