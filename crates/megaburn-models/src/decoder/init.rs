use std::sync::Arc;

use burn::prelude::Device;
use megaburn_collective::Group;
use megaburn_mesh::{ShardPlan, Zigzag};
use megaburn_parallel::{
    ActivationOffload, CrossEntropyConfig, ExpertGroups, PositionEmbeddingConfig,
    VocabParallelEmbeddingConfig, shard_plan,
};
use megaburn_pipeline::StageLayers;

use super::{
    Block, Decoder, DecoderConfig, Positions, Recompute, block::norm, model::DecoderParts,
};
use crate::ModelError;

impl DecoderConfig {
    /// Initialises this rank's shard of a new model: normal with deviation 0.02, the projections
    /// into the residual stream scaled down by `sqrt(2 layers)` (Megatron's default), biases zero.
    /// A parameter is initialised at its first use, so a parameter that is loaded before costs
    /// nothing.
    ///
    /// # Errors
    /// Sizes that no model can have, or that are not divisible by the group.
    /// # Collective
    /// Nothing is sent; every member of the tensor-parallel group creates its own shard.
    pub fn init(
        &self,
        group: &Group,
        sequence_parallel: bool,
        device: &Device,
    ) -> Result<Decoder, ModelError> {
        self.init_stages(
            &[StageLayers::whole(self.layers)],
            group,
            sequence_parallel,
            device,
        )
    }

    /// Initialises the pipeline stages of this rank. Every value equals its value in the full
    /// model. If `groups` is a tensor-parallel group only, every rank holds all experts unsharded.
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
        groups: impl Into<ExpertGroups>,
        sequence_parallel: bool,
        device: &Device,
    ) -> Result<Decoder, ModelError> {
        let groups = groups.into();
        let group = &groups.tp;
        self.validate()?;
        if let Some(experts) = &self.experts {
            experts.check_grid(&groups)?;
        }
        let begins = stages.iter().any(|stage| stage.embedding);
        let ends = stages.iter().any(|stage| stage.loss);
        let vectors = |name: &str| {
            VocabParallelEmbeddingConfig::new(self.vocab, self.hidden)
                .with_sequence_parallel(sequence_parallel)
                .with_name(name)
                .init(group, device)
        };
        let positions = || {
            PositionEmbeddingConfig::new(self.max_seq_len, self.hidden)
                .with_sequence_parallel(sequence_parallel)
                .with_name("positions")
                .init(group, device)
        };
        // On a rank with the last stage but not the first, the embedding is a copy of the first
        // stage's.
        let embedding = || Ok::<_, ModelError>(vectors("embedding")?.as_copy((!begins).into()));
        let reads_again = ends && (self.tied || self.mtp_layers > 0);
        let mut blocks: Vec<Option<Block>> = (0..self.num_blocks()).map(|_| None).collect();
        let behind = if ends {
            self.layers..self.num_blocks()
        } else {
            0..0
        };
        for index in stages
            .iter()
            .flat_map(|stage| stage.layers.clone())
            .chain(behind)
        {
            blocks[index] = Some(Block::new(self, index, &groups, sequence_parallel, device)?);
        }
        let has_positions = begins && self.positions == Positions::Learned;
        Ok(Decoder {
            embedding: (begins || reads_again).then(embedding).transpose()?,
            positions: has_positions.then(positions).transpose()?,
            blocks,
            norm: ends.then(|| norm(self, group, sequence_parallel, device)),
            dropout: None,
            head: (ends && !self.tied).then(|| vectors("head")).transpose()?,
            parts: DecoderParts {
                config: self.clone(),
                stages: stages.to_vec(),
                loss: CrossEntropyConfig::new(self.vocab).init(group)?,
                fused_loss: false,
                recompute: Recompute::default(),
                offload: ActivationOffload::default(),
                group: group.clone(),
                sequence_parallel,
                context: Group::single(group.seed()),
                zigzag: Zigzag::WHOLE,
                rope: Arc::default(),
            },
        })
    }

    /// The plan of all parameters of the unsharded model, as a group of one rank holds them.
    ///
    /// # Errors
    /// Sizes that no model can have.
    pub fn whole_plan(&self) -> Result<ShardPlan, ModelError> {
        Ok(shard_plan(&self.init(
            &Group::single(0),
            false,
            &Device::flex(),
        )?)?)
    }
}
