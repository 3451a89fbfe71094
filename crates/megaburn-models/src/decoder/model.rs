use std::sync::{Arc, Mutex, PoisonError};

use burn::{
    module::Module,
    prelude::{Device, Int},
    tensor::Tensor,
};
use megaburn_collective::{Group, region::gather_from_last_dim};
use megaburn_kernels::RopeTable;
use megaburn_mesh::ShardPlan;
use megaburn_parallel::{
    CrossEntropy, CrossEntropyConfig, Norm, PlanBuilder, PositionEmbedding,
    PositionEmbeddingConfig, Residual, Sharded, VocabParallelEmbedding,
    VocabParallelEmbeddingConfig, shard_plan,
};

use super::{Block, DecoderConfig, Positions, block::norm};
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
        self.validate()?;
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
        let blocks =
            (0..self.layers).map(|index| Block::new(self, index, group, sequence_parallel, device));
        Ok(Decoder {
            embedding: vectors("embedding")?,
            positions: match self.positions {
                Positions::Learned => Some(positions()?),
                Positions::Rotary { .. } => None,
            },
            blocks: blocks.collect::<Result<_, _>>()?,
            norm: norm(self, group, sequence_parallel, device),
            head: if self.tied { None } else { Some(vectors("head")?) },
            parts: Parts {
                config: self.clone(),
                loss: CrossEntropyConfig::new(self.vocab).init(group)?,
                fused_loss: false,
                group: group.clone(),
                rope: Arc::default(),
            },
        })
    }

    /// The parameters of the whole model, as a group of one holds them.
    ///
    /// # Errors
    /// Sizes that no model can have.
    pub fn whole_plan(&self) -> Result<ShardPlan, ModelError> {
        Ok(shard_plan(&self.init(&Group::single(0), false, &Device::flex())?)?)
    }
}

/// A decoder-only transformer.
///
/// Shapes: `S` sequence, `B` batch, `V` padded vocabulary, `n` tensor-parallel ranks. With sequence
/// parallelism the residual stream between the blocks holds `S / n`.
///
/// # Collective
/// All members of the tensor-parallel group call every method together.
#[derive(Module, Debug)]
pub struct Decoder {
    /// Token vectors.
    pub embedding: VocabParallelEmbedding,
    /// Position vectors; none where positions are rotations.
    pub positions: Option<PositionEmbedding>,
    /// The blocks.
    pub blocks: Vec<Block>,
    /// The last norm.
    pub norm: Norm,
    /// The output projection; none when tied to the embedding.
    pub head: Option<VocabParallelEmbedding>,
    #[module(skip)]
    pub(super) parts: Parts,
}

/// What a decoder holds beside its parameters.
#[derive(Clone, Debug)]
pub(super) struct Parts {
    config: DecoderConfig,
    loss: CrossEntropy,
    /// Whether the loss goes without all logits.
    fused_loss: bool,
    group: Group,
    /// The rotary table of the last device and sequence length: all calls of a run share one.
    rope: Arc<Mutex<Option<(Device, RopeTable)>>>,
}

impl Decoder {
    /// Whether [`loss`](Self::loss) computes some tokens' logits at a time, and those once more
    /// backward ([`CrossEntropy::forward_linear`]), instead of holding all of them. Off at first.
    #[must_use]
    pub fn with_fused_linear_cross_entropy(mut self, fused: bool) -> Self {
        self.parts.fused_loss = fused;
        self
    }

    /// This rank's columns of the logits.
    ///
    /// # Shapes
    /// tokens `[S, B]`, output `[S, B, V / n]`
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        self.logits(self.stream(tokens))
    }

    /// The residual stream behind the last block.
    fn stream(&self, tokens: Tensor<2, Int>) -> Residual {
        let positions: Vec<usize> = (0..tokens.dims()[0]).collect();
        let rope = self.rope(positions.len(), &tokens.device());
        let mut x = Residual::from(self.embed(tokens, &positions));
        for block in &self.blocks {
            x = block.forward(x, rope.as_ref());
        }
        x
    }

    /// The sum of the next-token losses in nats; a label that is -100 does not count.
    ///
    /// # Shapes
    /// tokens and labels `[S, B]`; the sum is `[1]`, the same on every member
    pub fn loss(&self, tokens: Tensor<2, Int>, labels: Tensor<2, Int>) -> Tensor<1> {
        let (stream, loss) = (self.stream(tokens), &self.parts.loss);
        let losses = match self.parts.fused_loss {
            true => self.output().losses(stream.normed(&self.norm).0, labels, loss),
            false => loss.forward(self.logits(stream), labels),
        };
        let count = losses.shape().num_elements();
        // Burn's `sum` adds into its result atomically, which CubeCL does not take for writing: of losses
        // that were never computed (out of memory, say) it gives 0 and no error.
        losses.reshape([1, count]).sum_dim(1).reshape([1])
    }

    /// The logits of the whole vocabulary, on every member.
    ///
    /// # Shapes
    /// tokens `[S, B]`, output `[S, B, vocab]`
    pub fn full_logits(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        self.gathered(self.forward(tokens))
    }

    /// The sizes and parts.
    pub fn config(&self) -> &DecoderConfig {
        &self.parts.config
    }

    /// The tensor-parallel group.
    pub fn group(&self) -> &Group {
        &self.parts.group
    }

    pub(super) fn embed(&self, tokens: Tensor<2, Int>, positions: &[usize]) -> Tensor<3> {
        let x = self.embedding.forward(tokens);
        match &self.positions {
            Some(vectors) => x + vectors.forward(positions),
            None => x,
        }
    }

    pub(super) fn logits(&self, x: Residual) -> Tensor<3> {
        self.output().logits(x.normed(&self.norm).0)
    }

    /// The output projection.
    fn output(&self) -> &VocabParallelEmbedding {
        self.head.as_ref().unwrap_or(&self.embedding)
    }

    pub(super) fn gathered(&self, logits: Tensor<3>) -> Tensor<3> {
        let logits = gather_from_last_dim(logits, &self.parts.group);
        logits.narrow(2, 0, self.parts.config.vocab)
    }

    fn rope(&self, seq_len: usize, device: &Device) -> Option<RopeTable> {
        let config = self.parts.config.rope()?;
        let mut cached = self.parts.rope.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((place, table)) = &*cached
            && (place, table.num_positions()) == (device, seq_len)
        {
            return Some(table.clone());
        }
        let table = config.init(0..seq_len, device).expect("the configuration was validated");
        *cached = Some((device.clone(), table.clone()));
        Some(table)
    }
}

impl Sharded for Decoder {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.child("embedding", &self.embedding);
        self.positions.iter().for_each(|positions| plan.child("positions", positions));
        plan.children("blocks", &self.blocks);
        plan.child("norm", &self.norm);
        self.head.iter().for_each(|head| plan.child("head", head));
    }
}
