use std::sync::Arc;

use burn::{nn::Initializer, prelude::Device};
use megaburn_collective::Group;
use megaburn_mesh::{ShardPlan, Zigzag};
use megaburn_parallel::{
    ActivationOffload, Attention, AttentionGroups, ContextParallel, CrossEntropyConfig, Mlp,
    MlpConfig, Moe, Norm, NormConfig, ParallelDropout, ParallelDropoutConfig,
    PositionEmbeddingConfig, SelfAttentionConfig, VocabParallelEmbedding,
    VocabParallelEmbeddingConfig, shard_plan,
};
use megaburn_pipeline::StageLayers;

use super::{
    Block, Decoder, DecoderConfig, Experts, ModelGroups, ModelOptions, Positions,
    model::DecoderParts, recompute::BlockRecompute,
};
use crate::ModelError;

impl DecoderConfig {
    /// Initialises this rank's shard of a new model: normal with deviation 0.02, the projections
    /// into the residual stream scaled down by `sqrt(2 layers)` (Megatron's default), biases zero.
    /// A parameter is initialised at its first use, so a parameter that is loaded before costs
    /// nothing.
    ///
    /// # Errors
    /// Sizes or options that no model can have, or that the groups do not divide.
    /// # Collective
    /// Nothing is sent; every member of the tensor-parallel group creates its own shard.
    pub fn init(
        &self,
        groups: impl Into<ModelGroups>,
        options: &ModelOptions,
        device: &Device,
    ) -> Result<Decoder, ModelError> {
        let whole = [StageLayers::whole(self.layers)];
        self.init_stages(&whole, groups, options, device)
    }

    /// Initialises the pipeline stages of this rank. Every value equals its value in the full
    /// model.
    ///
    /// # Errors
    /// As [`init`](Self::init).
    /// # Collective
    /// As [`init`](Self::init).
    ///
    /// # Panics
    /// If a stage has layers that the model does not have.
    pub fn init_stages(
        &self,
        stages: &[StageLayers],
        groups: impl Into<ModelGroups>,
        options: &ModelOptions,
        device: &Device,
    ) -> Result<Decoder, ModelError> {
        let groups = groups.into();
        let group = &groups.layers.tp;
        self.validate()?;
        if let Some(experts) = &self.experts {
            experts.check_grid(&groups.layers)?;
        }
        let build = ModelBuilder {
            config: self,
            options,
            groups: &groups,
            zigzag: Zigzag::new(groups.cp.rank(), groups.cp.size()),
            device,
        };
        let begins = stages.iter().any(|stage| stage.embedding);
        let ends = stages.iter().any(|stage| stage.loss);
        // On a rank with the last stage but not the first, the embedding is a copy of the first
        // stage's.
        let embedding =
            || Ok::<_, ModelError>(build.vectors("embedding")?.as_copy((!begins).into()));
        let positions = || {
            PositionEmbeddingConfig::new(self.max_seq_len, self.hidden)
                .with_sequence_parallel(options.sequence_parallel)
                .with_name("positions")
                .init(group, device)
        };
        let reads_again = ends && (self.tied || self.mtp_layers > 0);
        let has_positions = begins && self.positions == Positions::Learned;
        Ok(Decoder {
            embedding: (begins || reads_again).then(embedding).transpose()?,
            positions: has_positions.then(positions).transpose()?,
            blocks: build.blocks(stages)?,
            norm: ends.then(|| build.norm(options.recompute.norm)),
            dropout: build.dropout("embedding")?,
            head: (ends && !self.tied)
                .then(|| build.vectors("head"))
                .transpose()?,
            parts: DecoderParts {
                config: self.clone(),
                options: options.clone(),
                stages: stages.to_vec(),
                loss: CrossEntropyConfig::new(self.vocab).init(group)?,
                offload: ActivationOffload::default(),
                group: group.clone(),
                zigzag: build.zigzag,
                cp: groups.cp.clone(),
                rope: Arc::default(),
            },
        })
    }

    /// The plan of all parameters of the unsharded model, as a group of one rank holds them.
    ///
    /// # Errors
    /// Sizes that no model can have.
    pub fn whole_plan(&self) -> Result<ShardPlan, ModelError> {
        let whole = self.init(&Group::single(0), &ModelOptions::default(), &Device::flex())?;
        Ok(shard_plan(&whole)?)
    }
}

/// Builds the parts of a model on this rank.
pub(super) struct ModelBuilder<'a> {
    pub(super) config: &'a DecoderConfig,
    pub(super) options: &'a ModelOptions,
    pub(super) groups: &'a ModelGroups,
    /// The chunks of each sequence that this rank holds.
    zigzag: Zigzag,
    pub(super) device: &'a Device,
}

impl ModelBuilder<'_> {
    /// The blocks of these stages, followed by those of multi-token prediction if the last stage is
    /// one of them. A block is at its number in the full model.
    fn blocks(&self, stages: &[StageLayers]) -> Result<Vec<Option<Block>>, ModelError> {
        let Self {
            config, options, ..
        } = self;
        let cp = self.context_parallel()?;
        let mut blocks: Vec<Option<Block>> = (0..config.num_blocks()).map(|_| None).collect();
        let mut build = |index: usize, recompute: BlockRecompute| {
            let cp = &cp[index.min(cp.len() - 1)];
            blocks[index] = Some(Block::new(self, index, cp, recompute)?);
            Ok::<_, ModelError>(())
        };
        for stage in stages {
            for (place, index) in stage.layers.clone().enumerate() {
                build(index, options.recompute.of_block(place, stage.layers.len()))?;
            }
        }
        if let Some(last) = stages.iter().find(|stage| stage.loss) {
            for depth in 0..config.mtp_layers {
                let recompute = options.recompute.of_mtp_block(last.layers.len() + depth);
                build(config.layers + depth, recompute)?;
            }
        }
        Ok(blocks)
    }

    /// The context-parallel ranks for each element of `cp_comm`. Layers with equal exchanges share
    /// their communicators.
    fn context_parallel(&self) -> Result<Vec<ContextParallel>, ModelError> {
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
    fn vectors(&self, name: &str) -> Result<VocabParallelEmbedding, ModelError> {
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
