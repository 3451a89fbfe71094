use burn::{nn::Initializer, prelude::Device};
use megaburn_mesh::Zigzag;
use megaburn_parallel::{
    Attention, AttentionGroups, ContextParallel, CrossAttention, CrossAttentionConfig,
    LinearPrecision, Mlp, MlpConfig, Moe, MoeConfig, MultiLatentAttentionConfig, Norm, NormConfig,
    ParallelDropout, ParallelDropoutConfig, PrecisionScope, QkNorm, RelativeBias,
    RelativeBiasConfig, SelfAttentionConfig, VocabParallelEmbedding, VocabParallelEmbeddingConfig,
};
use megaburn_pipeline::StageLayers;

use super::{DecoderConfig, Experts, ModelGroups, ModelOptions};
use crate::error::ModelError;

/// Builds the parts of a model on this rank.
#[derive(Debug)]
pub(super) struct ModelBuilder<'a> {
    pub(super) config: &'a DecoderConfig,
    pub(super) options: &'a ModelOptions,
    pub(super) groups: &'a ModelGroups,
    /// What its quantised layers share.
    pub(super) scope: PrecisionScope,
    /// The chunks of each sequence that this rank holds.
    pub(super) zigzag: Zigzag,
    pub(super) device: &'a Device,
}

impl ModelBuilder<'_> {
    /// The context-parallel ranks for each element of `cp_comm`. Layers with equal exchanges share
    /// their communicators.
    pub(super) fn context_parallel(&self) -> Result<Vec<ContextParallel>, ModelError> {
        let comms = &self.options.cp_comm;
        let layers = self.config.layers;
        if ![1, layers].contains(&comms.len()) {
            let found = comms.len();
            let why = format!(
                "{found} cp_comm values are given for {layers} layers: give one, or one per layer"
            );
            return Err(ModelError::Config(why));
        }
        let mut made: Vec<ContextParallel> = Vec::with_capacity(comms.len());
        for &comm in comms {
            let same = made.iter().find(|made| made.comm() == comm).cloned();
            made.push(match same {
                Some(parallel) => parallel,
                None => ContextParallel::new(&self.groups.cp, comm)?,
            });
        }
        Ok(made)
    }

    /// A norm of the residual stream.
    pub(super) fn norm(&self, recompute: bool) -> Norm {
        let layer = NormConfig {
            epsilon: self.config.norm_eps,
            recompute,
            sequence_parallel: self.options.sequence_parallel,
            zero_centered_gamma: self.config.zero_centered_gamma,
            ..NormConfig::new(self.config.hidden, self.config.norm)
        };
        layer.init(&self.groups.layers.tp, self.device)
    }

    /// Dropout on the output of the part at `path`.
    pub(super) fn dropout(&self, path: &str) -> Result<ParallelDropout, ModelError> {
        let layer = ParallelDropoutConfig {
            prob: self.options.dropout.hidden,
            name: format!("{path}.dropout"),
            sequence_parallel: self.options.sequence_parallel,
        };
        Ok(layer.init(&self.groups.layers.tp, self.zigzag)?)
    }

    /// The matrix at `path` with a vector for each token: the embedding, or the output projection.
    pub(super) fn vocab_embedding(&self, path: &str) -> Result<VocabParallelEmbedding, ModelError> {
        let layer = VocabParallelEmbeddingConfig {
            sequence_parallel: self.options.sequence_parallel,
            initializer: self.vector_initializer(),
            path: Some(path.into()),
            ..VocabParallelEmbeddingConfig::new(self.config.vocab, self.config.hidden)
        };
        Ok(layer.init(&self.groups.layers.tp, self.device)?)
    }

    /// The initializer of parameters that have at most one dimension which grows with the width of
    /// the model: the vectors of tokens and positions, the output projection, sinks and relative
    /// biases. Their
    /// deviation is the same at every width (Yang et al., "Tensor Programs V", 2022, table 8).
    pub(super) fn vector_initializer(&self) -> Initializer {
        Initializer::Normal {
            mean: 0.0,
            std: self.config.init_std,
        }
    }

    /// The initializer of all other matrices than projections into the residual stream.
    pub(super) fn initializer(&self) -> Initializer {
        Initializer::Normal {
            mean: 0.0,
            std: self.hidden_std(),
        }
    }

    /// The deviation of the matrices in blocks.
    fn hidden_std(&self) -> f64 {
        self.config.init_std / self.config.width_multiplier().sqrt()
    }

    /// The initializer of projections into the residual stream.
    fn output_initializer(&self) -> Initializer {
        Initializer::Normal {
            mean: 0.0,
            std: self.hidden_std() / (2.0 * self.config.layers as f64).sqrt(),
        }
    }

    /// How the matrices of block `index` are quantised.
    fn precision(&self, index: usize) -> Option<LinearPrecision> {
        self.options.precision.of_block(index, self.config.layers)
    }

    /// The attention of block `index`.
    pub(super) fn attention(
        &self,
        index: usize,
        cp: &ContextParallel,
        recompute: bool,
    ) -> Result<Attention, ModelError> {
        let Self {
            config, options, ..
        } = self;
        let groups = AttentionGroups {
            tp: self.groups.layers.tp.clone(),
            cp: cp.clone(),
        };
        let path = Some(format!("blocks.{index}.attention"));
        if let Some(latent) = &config.latent {
            let layer = MultiLatentAttentionConfig {
                softmax_scale: config.softmax_scale(),
                dropout: options.dropout.attention,
                record_max_logits: options.record_max_logits,
                kernel: options.attention,
                recompute,
                sequence_parallel: options.sequence_parallel,
                precision: self.precision(index),
                initializer: self.initializer(),
                output_initializer: self.output_initializer(),
                path,
                ..latent.layer(config.hidden, config.heads)
            };
            return Ok(layer.init(groups, self.device)?.in_scope(&self.scope));
        }
        let DecoderConfig {
            hidden,
            heads,
            kv_heads,
            head_dim,
            ..
        } = **config;
        let layer = SelfAttentionConfig {
            qkv_bias: config.qkv_bias,
            output_bias: config.output_bias,
            qk_norm: config.qk_norm.map(|kind| QkNorm {
                kind,
                epsilon: config.norm_eps,
                zero_centered_gamma: config.zero_centered_gamma,
            }),
            softmax_scale: config.softmax_scale(),
            soft_cap: config.attention_soft_cap,
            causal: !config.sees_later(index),
            alibi: config.positions.alibi(),
            relative_bias: config.positions.relative().is_some(),
            sinks: config.attention_sinks,
            window: config.layer_window(index),
            dropout: options.dropout.attention,
            record_max_logits: options.record_max_logits,
            kernel: options.attention,
            recompute,
            sequence_parallel: options.sequence_parallel,
            precision: self.precision(index),
            initializer: self.initializer(),
            sinks_initializer: self.vector_initializer(),
            output_initializer: self.output_initializer(),
            path,
            ..SelfAttentionConfig::new(hidden, heads, kv_heads, head_dim)
        };
        Ok(layer.init(groups, self.device)?.in_scope(&self.scope))
    }

    /// The attention of block `index` to the output of the encoder.
    pub(super) fn cross_attention(
        &self,
        index: usize,
        recompute: bool,
    ) -> Result<CrossAttention, ModelError> {
        let Self {
            config, options, ..
        } = self;
        let layer = CrossAttentionConfig {
            num_kv_heads: Some(config.kv_heads),
            qkv_bias: config.qkv_bias,
            output_bias: config.output_bias,
            softmax_scale: config.softmax_scale(),
            dropout: options.dropout.attention,
            kernel: options.attention,
            recompute,
            sequence_parallel: options.sequence_parallel,
            precision: self.precision(index),
            initializer: self.initializer(),
            output_initializer: self.output_initializer(),
            path: Some(format!("blocks.{index}.cross_attention")),
            ..CrossAttentionConfig::new(config.hidden, config.heads, config.head_dim)
        };
        let layer = layer.init(&self.groups.layers.tp, self.device)?;
        Ok(layer.in_scope(&self.scope))
    }

    /// The relative bias of the blocks that see later positions, or of the others, if these stages
    /// have such blocks. It is a copy unless they have the first of these blocks.
    pub(super) fn relative_bias(
        &self,
        stages: &[StageLayers],
        of_encoder: bool,
    ) -> Result<Option<RelativeBias>, ModelError> {
        let Self { config, .. } = self;
        let relative = config.positions.relative();
        let Some(relative) = relative.filter(|_| config.uses_bias(stages, of_encoder)) else {
            return Ok(None);
        };
        let name = if of_encoder {
            "encoder_bias"
        } else {
            "decoder_bias"
        };
        let layer = RelativeBiasConfig {
            bidirectional: of_encoder,
            initializer: self.vector_initializer(),
            path: Some(name.into()),
            ..RelativeBiasConfig::new(relative.num_buckets, relative.max_distance, config.heads)
        };
        let first = config.owner_of_bias(of_encoder);
        let owns = stages.iter().any(|stage| stage.layers.contains(&first));
        let layer = layer.init(&self.groups.layers.tp, self.device)?;
        Ok(Some(layer.as_copy((!owns).into())))
    }

    /// The MLP of block `index`.
    pub(super) fn mlp(&self, index: usize, recompute: bool) -> Result<Mlp, ModelError> {
        let layer = MlpConfig {
            activation: self.config.activation,
            bias: self.config.mlp_bias,
            recompute,
            sequence_parallel: self.options.sequence_parallel,
            precision: self.precision(index),
            initializer: self.initializer(),
            output_initializer: self.output_initializer(),
            path: Some(format!("blocks.{index}.mlp")),
            ..MlpConfig::new(self.config.hidden, self.config.ffn)
        };
        let layer = layer.init(&self.groups.layers.tp, self.device)?;
        Ok(layer.in_scope(&self.scope))
    }

    /// The experts of block `index`.
    pub(super) fn moe(
        &self,
        experts: &Experts,
        index: usize,
        recompute: bool,
    ) -> Result<Moe, ModelError> {
        let are_quantised = !self.options.precision.experts_in_bf16;
        let layer = MoeConfig {
            activation: self.config.activation,
            bias: self.config.mlp_bias,
            recompute,
            sequence_parallel: self.options.sequence_parallel,
            precision: self.precision(index),
            expert_precision: self.precision(index).filter(|_| are_quantised),
            initializer: self.initializer(),
            output_initializer: self.output_initializer(),
            path: Some(format!("blocks.{index}.moe")),
            ..experts.layer(self.config.hidden)
        };
        let moe = layer.init(self.groups.layers.clone(), self.options.moe, self.device)?;
        // Forces the lazy initialisation of the biases: parameters that are not initialised yet
        // count as ones with a gradient.
        moe.router.biases();
        Ok(moe.in_scope(&self.scope))
    }
}
