use burn::{nn::Initializer, prelude::Device};
use megaburn_mesh::Zigzag;
use megaburn_parallel::{
    Attention, AttentionGroups, ContextParallel, Mlp, MlpConfig, Moe, Norm, NormConfig,
    ParallelDropout, ParallelDropoutConfig, SelfAttentionConfig, VocabParallelEmbedding,
    VocabParallelEmbeddingConfig,
};

use super::{DecoderConfig, Experts, ModelGroups, ModelOptions};
use crate::error::ModelError;

/// Builds the parts of a model on this rank.
pub(super) struct ModelBuilder<'a> {
    pub(super) config: &'a DecoderConfig,
    pub(super) options: &'a ModelOptions,
    pub(super) groups: &'a ModelGroups,
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
        NormConfig::new(self.config.hidden, self.config.norm)
            .with_epsilon(self.config.norm_eps)
            .with_sequence_parallel(self.options.sequence_parallel)
            .with_recompute(recompute)
            .init(&self.groups.layers.tp, self.device)
    }

    /// Dropout on the output of the part at `path`.
    pub(super) fn dropout(&self, path: &str) -> Result<ParallelDropout, ModelError> {
        let layer =
            ParallelDropoutConfig::new(self.options.dropout.hidden, format!("{path}.dropout"))
                .with_sequence_parallel(self.options.sequence_parallel);
        Ok(layer.init(&self.groups.layers.tp, self.zigzag)?)
    }

    /// A matrix of the vocabulary.
    pub(super) fn vectors(&self, name: &str) -> Result<VocabParallelEmbedding, ModelError> {
        let layer = VocabParallelEmbeddingConfig::new(self.config.vocab, self.config.hidden)
            .with_sequence_parallel(self.options.sequence_parallel)
            .with_name(name);
        Ok(layer.init(&self.groups.layers.tp, self.device)?)
    }

    /// The initializer of projections into the residual stream.
    fn output_initializer(&self) -> Initializer {
        Initializer::Normal {
            mean: 0.0,
            std: 0.02 / (2.0 * self.config.layers as f64).sqrt(),
        }
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
        let name = format!("blocks.{index}.attention");
        let groups = AttentionGroups {
            tp: self.groups.layers.tp.clone(),
            cp: cp.clone(),
        };
        if let Some(latent) = &config.latent {
            let attention = latent
                .layer(config.hidden, config.heads)
                .with_softmax_scale(config.softmax_scale())
                .with_dropout(options.dropout.attention)
                .with_recompute(recompute)
                .with_kernel(options.attention)
                .with_sequence_parallel(options.sequence_parallel)
                .with_output_initializer(self.output_initializer())
                .with_name(name);
            return Ok(attention.init(groups, self.device)?);
        }
        let DecoderConfig {
            hidden,
            heads,
            kv_heads,
            head_dim,
            ..
        } = **config;
        let mut attention = SelfAttentionConfig::new(hidden, heads, kv_heads, head_dim)
            .with_qkv_bias(config.qkv_bias)
            .with_output_bias(config.output_bias)
            .with_dropout(options.dropout.attention)
            .with_recompute(recompute)
            .with_kernel(options.attention)
            .with_sequence_parallel(options.sequence_parallel)
            .with_output_initializer(self.output_initializer())
            .with_name(name);
        attention.window = config.layer_window(index);
        attention.qk_norm = config.qk_norm.then_some(config.norm_eps);
        Ok(attention.init(groups, self.device)?)
    }

    /// The MLP of block `index`.
    pub(super) fn mlp(&self, index: usize, recompute: bool) -> Result<Mlp, ModelError> {
        let layer = MlpConfig::new(self.config.hidden, self.config.ffn)
            .with_activation(self.config.activation)
            .with_bias(self.config.mlp_bias)
            .with_recompute(recompute)
            .with_sequence_parallel(self.options.sequence_parallel)
            .with_output_initializer(self.output_initializer())
            .with_name(format!("blocks.{index}.mlp"));
        Ok(layer.init(&self.groups.layers.tp, self.device)?)
    }

    /// The experts of block `index`.
    pub(super) fn moe(
        &self,
        experts: &Experts,
        index: usize,
        recompute: bool,
    ) -> Result<Moe, ModelError> {
        let layer = experts
            .layer(self.config.hidden)
            .with_activation(self.config.activation)
            .with_recompute(recompute)
            .with_sequence_parallel(self.options.sequence_parallel)
            .with_output_initializer(self.output_initializer())
            .with_name(format!("blocks.{index}.moe"));
        let moe = layer.init(self.groups.layers.clone(), self.options.moe, self.device)?;
        // Forces the lazy initialisation of the biases: parameters that are not initialised yet
        // count as ones with a gradient.
        moe.router.biases();
        Ok(moe)
    }
}
