use std::sync::Arc;

use burn::prelude::Device;
use megaburn_collective::Group;
use megaburn_mesh::{ShardPlan, Zigzag};
use megaburn_parallel::{
    ActivationOffload, CrossEntropyConfig, PositionEmbeddingConfig, PrecisionScope, shard_plan,
};
use megaburn_pipeline::StageLayers;

use super::{
    BinaryHead, Block, Decoder, DecoderConfig, HeadParts, MaskedHead, ModelGroups, ModelOptions,
    builder::ModelBuilder, model::DecoderParts, recompute_options::BlockRecompute,
};
use crate::error::ModelError;

impl DecoderConfig {
    /// Initialises this rank's shard of a new model: normal with deviation `init_std`, the projections
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
        self.check_options(options)?;
        if let Some(experts) = &self.experts {
            experts.check_grid(&groups.layers)?;
        }
        let zigzag = Zigzag::new(groups.cp.rank(), groups.cp.size());
        let build = ModelBuilder {
            config: self,
            options,
            groups: &groups,
            scope: PrecisionScope::new(groups.layers.tp_cp.clone(), zigzag),
            zigzag,
            device,
        };
        let begins = stages.iter().any(|stage| stage.embedding);
        let ends = stages.iter().any(|stage| stage.loss);
        // On a rank with the last stage but not the first, the embedding is a copy of the first
        // stage's.
        let embedding = || {
            let layer = build.vocab_embedding("embedding")?;
            Ok::<_, ModelError>(layer.as_copy((!begins).into()))
        };
        let vectors = |name: &str, count: usize| {
            PositionEmbeddingConfig::new(count, self.hidden)
                .with_sequence_parallel(options.sequence_parallel)
                .with_initializer(build.vector_initializer())
                .with_name(name)
                .init(group, device)
        };
        let reads_again = ends && (self.tied || self.mtp_layers > 0);
        let has_positions = begins && self.learns_positions();
        let own_head = self.family.definition().head();
        Ok(Decoder {
            embedding: (begins || reads_again).then(embedding).transpose()?,
            positions: has_positions
                .then(|| vectors("positions", self.max_seq_len))
                .transpose()?,
            token_types: (begins && self.token_types > 0)
                .then(|| vectors("token_types", self.token_types))
                .transpose()?,
            embedding_norm: (begins && self.embedding_norm).then(|| build.norm(false)),
            encoder_bias: build.relative_bias(stages, true)?,
            decoder_bias: build.relative_bias(stages, false)?,
            blocks: blocks(&build, stages)?,
            norm: (ends && self.norm_placement.has_last_norm())
                .then(|| build.norm(options.recompute.norm)),
            masked_head: (ends && self.masked_head)
                .then(|| MaskedHead::new(&build))
                .transpose()?,
            binary_head: (ends && self.binary_head)
                .then(|| BinaryHead::new(&build))
                .transpose()?,
            dropout: build.dropout("embedding")?,
            decoder_dropout: build.dropout("decoder_embedding")?,
            head: (ends && !self.tied)
                .then(|| build.vocab_embedding("head"))
                .transpose()?,
            output_head: own_head
                .filter(|_| ends)
                .map(|init| init(&HeadParts(&build)))
                .transpose()?,
            parts: DecoderParts {
                config: self.clone(),
                options: options.clone(),
                stages: stages.to_vec(),
                loss: self.loss(options).init(group)?,
                offload: ActivationOffload::default(),
                group: group.clone(),
                zigzag: build.zigzag,
                cp: groups.cp.clone(),
                ropes: Arc::default(),
                weights: build.scope.weights.clone(),
            },
        })
    }

    fn loss(&self, options: &ModelOptions) -> CrossEntropyConfig {
        // Without the fused loss, the model caps the logits itself.
        let fused = options.fused_linear_cross_entropy;
        CrossEntropyConfig::new(self.vocab)
            .with_label_smoothing(options.loss.label_smoothing)
            .with_z_loss(options.loss.z_loss)
            .with_soft_cap(self.logits_soft_cap.filter(|_| fused))
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

/// The blocks of these stages, followed by those of multi-token prediction if the last stage is
/// one of them. A block is at its number in the full model.
fn blocks(
    builder: &ModelBuilder<'_>,
    stages: &[StageLayers],
) -> Result<Vec<Option<Block>>, ModelError> {
    let ModelBuilder {
        config, options, ..
    } = builder;
    let cp = builder.context_parallel()?;
    let mut blocks: Vec<Option<Block>> = (0..config.num_blocks()).map(|_| None).collect();
    let mut build = |index: usize, recompute: BlockRecompute| {
        let cp = &cp[index.min(cp.len() - 1)];
        blocks[index] = Some(Block::new(builder, index, cp, recompute)?);
        Ok::<_, ModelError>(())
    };
    for stage in stages {
        for index in stage.layers.clone() {
            let recompute = options.recompute;
            build(index, recompute.of_block(index, config, &stage.layers))?;
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
