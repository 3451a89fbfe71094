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
    /// This rank's shard of a freshly drawn model: normal with deviation 0.02, the projections into
    /// the residual stream scaled down by `sqrt(2 layers)` (Megatron's default), biases at zero.
    /// A parameter is drawn when it is first used: one that is loaded before costs nothing.
    ///
    /// # Errors
    /// Sizes that no model can have, or that the group does not divide.
    /// # Collective
    /// Nothing is sent; every member of the tensor-parallel group makes its own shard.
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

    /// The stages of it that this rank of a pipeline has. Every value is what it is in the whole model. Of a
    /// tensor-parallel group alone every rank has all experts whole.
    ///
    /// # Errors
    /// As [`init`](Self::init).
    /// # Collective
    /// As [`init`](Self::init).
    ///
    /// # Panics
    /// If a stage has layers that the model has not.
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
        // Where the model only ends, they are a copy of those with which it begins.
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

    /// The parameters of the whole model, as a group of one holds them.
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
