use std::ops::Range;

use burn::prelude::Device;
use megaburn_parallel::SelectiveSave;

use super::DecoderConfig;

/// Which activations backward recomputes in place of saving them. By default none. Gradients are
/// bit-identical.
///
/// Source: Korthikanti et al., "Reducing activation recomputation in large transformer models"
/// (2022), <https://arxiv.org/abs/2205.05198>, section 5; Megatron-LM
/// `megatron/core/transformer/transformer_block.py`, `megatron/core/tensor_parallel/random.py`,
/// `CheckpointWithoutOutput`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recompute {
    /// Outputs of the norms (Megatron's `layernorm`), recomputed from the residual stream, which
    /// the norms save for their own backward.
    pub norm: bool,
    /// Outputs of the MLP activation functions (Megatron's `moe_act`, which is for experts only),
    /// recomputed from the output of the up matrix.
    pub activation: bool,
    /// Core attention (`core_attn`), recomputed from queries, keys and values. The fused kernels of
    /// GPUs never save its scores.
    pub core_attention: bool,
    /// The complete MLPs (`mlp`), recomputed from the output of the norm, or with `norm` from the
    /// residual stream.
    pub mlp: bool,
    /// Full recompute: complete blocks (`--recompute-granularity full`). The fields above are then
    /// ignored in these blocks.
    pub blocks: Option<RecomputeBlocks>,
    /// Whether the residual stream before these blocks is offloaded to host memory
    /// ([`ActivationOffload`](megaburn_parallel::ActivationOffload)), except for the last group of
    /// the model.
    pub offload: bool,
    /// Whether recomputed blocks save the output of attention
    /// ([`SelectiveSave`]).
    pub keep_attention: bool,
}

/// Which blocks of a stage are recomputed, from the residual stream before them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecomputeBlocks {
    /// All blocks, in groups of this size: only the residual stream before each group is saved
    /// (`--recompute-method uniform`).
    Uniform(usize),
    /// The first blocks, up to this number, one at a time (`--recompute-method block`).
    Block(usize),
}

/// Consecutive blocks of a stage, and whether backward recomputes them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) blocks: Range<usize>,
    pub(crate) recomputed: bool,
}

impl Recompute {
    /// What a recomputed region on this device saves of attention.
    pub(crate) fn selective_save(self, device: &Device) -> Option<SelectiveSave> {
        (self.keep_attention && device.is_autodiff()).then(SelectiveSave::default)
    }

    /// Divides a stage of `num_blocks` blocks into segments.
    fn segments(self, num_blocks: usize) -> Vec<Segment> {
        let (recomputed, group) = match self.blocks {
            None => (0, 1),
            Some(RecomputeBlocks::Uniform(group)) => (num_blocks, group.max(1)),
            Some(RecomputeBlocks::Block(first)) => (first.min(num_blocks), 1),
        };
        let groups = (0..recomputed)
            .step_by(group)
            .map(|start| start..(start + group).min(recomputed));
        let mut segments: Vec<_> = groups
            .map(|blocks| Segment {
                blocks,
                recomputed: true,
            })
            .collect();
        if recomputed < num_blocks {
            segments.push(Segment {
                blocks: recomputed..num_blocks,
                recomputed: false,
            });
        }
        segments
    }

    /// The segments of a stage with these blocks, by their numbers in the model. The encoder and the
    /// decoder have segments of their own.
    pub(crate) fn segments_of(self, model: &DecoderConfig, stage: &Range<usize>) -> Vec<Segment> {
        let cut = stage.start + model.encoder_blocks(stage);
        let of_segment = |Segment { blocks, recomputed }: Segment| {
            let blocks = stage.start + blocks.start..stage.start + blocks.end;
            let middle = cut.clamp(blocks.start, blocks.end);
            let halves = [blocks.start..middle, middle..blocks.end];
            let halves = halves.into_iter().filter(|blocks| !blocks.is_empty());
            halves.map(move |blocks| Segment { blocks, recomputed })
        };
        let segments = self.segments(stage.len()).into_iter();
        segments.flat_map(of_segment).collect()
    }

    /// Whether backward recomputes a block of multi-token prediction that follows `before` other
    /// blocks in the last stage. These blocks are recomputed one at a time, from the output of the
    /// depth before and the token embeddings.
    pub(crate) fn recomputes_mtp(self, before: usize) -> bool {
        match self.blocks {
            None => false,
            Some(RecomputeBlocks::Uniform(_)) => true,
            Some(RecomputeBlocks::Block(first)) => before < first,
        }
    }

    /// What block `index` of a stage recomputes.
    pub(super) fn of_block(
        self,
        index: usize,
        model: &DecoderConfig,
        stage: &Range<usize>,
    ) -> BlockRecompute {
        let segments = self.segments_of(model, stage).into_iter();
        match segments
            .filter(|segment| segment.recomputed)
            .find(|segment| segment.blocks.contains(&index))
        {
            // The norm of the first block is outside the checkpointed function: it saves the
            // residual stream, which is the only tensor that the segment saves.
            Some(segment) => BlockRecompute {
                attention_norm: index == segment.blocks.start && !self.offload,
                ..BlockRecompute::default()
            },
            None => self.of_saved_block(),
        }
    }

    /// What a block of multi-token prediction recomputes that follows `before` other blocks in the
    /// last stage.
    pub(super) fn of_mtp_block(self, before: usize) -> BlockRecompute {
        if self.recomputes_mtp(before) {
            BlockRecompute::default()
        } else {
            self.of_saved_block()
        }
    }

    /// What a block recomputes that is not recomputed as a whole.
    fn of_saved_block(self) -> BlockRecompute {
        BlockRecompute {
            attention_norm: self.norm,
            norm: self.norm,
            activation: self.activation && !self.mlp,
            core_attention: self.core_attention,
            mlp: self.mlp,
        }
    }
}

/// Which of its own activations a block recomputes. A block that is recomputed as a whole has
/// nothing to gain from its parts.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BlockRecompute {
    /// The output of the norm before the attention.
    pub(super) attention_norm: bool,
    /// The outputs of the other norms.
    pub(super) norm: bool,
    pub(super) activation: bool,
    pub(super) core_attention: bool,
    pub(super) mlp: bool,
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::families::Family;

    #[rstest]
    #[case(None, 5, &[], Some((0, 5)))]
    #[case(Some(RecomputeBlocks::Uniform(1)), 3, &[(0, 1), (1, 2), (2, 3)], None)]
    #[case(Some(RecomputeBlocks::Uniform(2)), 5, &[(0, 2), (2, 4), (4, 5)], None)]
    #[case(Some(RecomputeBlocks::Uniform(9)), 5, &[(0, 5)], None)]
    #[case(Some(RecomputeBlocks::Block(2)), 5, &[(0, 1), (1, 2)], Some((2, 5)))]
    #[case(Some(RecomputeBlocks::Block(7)), 2, &[(0, 1), (1, 2)], None)]
    #[case(Some(RecomputeBlocks::Block(0)), 2, &[], Some((0, 2)))]
    #[case(Some(RecomputeBlocks::Uniform(2)), 0, &[], None)]
    fn blocks_are_computed_again_in_groups_and_others_kept(
        #[case] blocks: Option<RecomputeBlocks>,
        #[case] num_blocks: usize,
        #[case] recomputed: &[(usize, usize)],
        #[case] kept: Option<(usize, usize)>,
    ) {
        let segment = |recomputed| {
            move |(start, end)| Segment {
                blocks: start..end,
                recomputed,
            }
        };
        let expected = recomputed
            .iter()
            .copied()
            .map(segment(true))
            .chain(kept.map(segment(false)));
        let recompute = Recompute {
            blocks,
            ..Recompute::default()
        };
        assert_eq!(recompute.segments(num_blocks), expected.collect::<Vec<_>>());
    }

    #[rstest]
    #[case(2..7, &[2..3, 3..4, 4..6, 6..7])]
    #[case(0..3, &[0..2, 2..3])]
    #[case(4..7, &[4..6, 6..7])]
    fn encoder_and_decoder_have_segments_of_their_own(
        #[case] stage: Range<usize>,
        #[case] expected: &[Range<usize>],
    ) {
        let model = DecoderConfig {
            layers: 7,
            encoder_layers: 3,
            ..Family::T5.template()
        };
        let recompute = Recompute {
            blocks: Some(RecomputeBlocks::Uniform(2)),
            ..Recompute::default()
        };
        let found = recompute.segments_of(&model, &stage);
        let found: Vec<_> = found.into_iter().map(|segment| segment.blocks).collect();
        assert_eq!(found, expected);
    }
}
