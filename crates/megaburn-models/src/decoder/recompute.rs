use std::ops::Range;

use megaburn_parallel::save_attention_output;

/// What backward computes once more instead of keeping it. Nothing at first. Gradients are the same to
/// the bit.
///
/// Source: Korthikanti et al., "Reducing activation recomputation in large transformer models"
/// (2022), <https://arxiv.org/abs/2205.05198>, section 5; Megatron-LM
/// `megatron/core/transformer/transformer_block.py`, `megatron/core/tensor_parallel/random.py`,
/// `CheckpointWithoutOutput`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recompute {
    /// What the norms give (`layernorm` there): from the residual stream, which their own backward keeps.
    pub norm: bool,
    /// What the MLPs' activations give (`moe_act` there, of experts only): from what the up matrix gave.
    pub activation: bool,
    /// Attention between its matrices (`core_attn`): from queries, keys and values. The fused kernels of
    /// GPUs never hold its scores.
    pub core_attention: bool,
    /// All of the MLPs (`mlp`): from what the norms give, and with `norm` from the residual stream.
    pub mlp: bool,
    /// Whole blocks, of which the fields above say nothing then (`--recompute-granularity full`).
    pub blocks: Option<RecomputeBlocks>,
    /// Whether the stream before these waits in host memory
    /// ([`ActivationOffload`](megaburn_parallel::ActivationOffload)), all but that before the model's last.
    pub offload: bool,
    /// Whether what attention gives is kept where whole blocks are computed once more
    /// ([`save_attention_output`](megaburn_parallel::keeping_attention)).
    pub keep_attention: bool,
}

/// Which blocks of a stage backward computes once more, from the residual stream before them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecomputeBlocks {
    /// All, as many at a time: only the stream before each such group is kept
    /// (`--recompute-method uniform`).
    Uniform(usize),
    /// The first so many, one at a time (`--recompute-method block`).
    Block(usize),
}

/// Blocks of a stage that are computed one behind the other, and whether backward does that once more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) blocks: Range<usize>,
    pub(crate) again: bool,
}

impl Recompute {
    /// Makes something that backward computes once more as it says.
    pub(crate) fn with_selective_save<T>(self, make: impl FnOnce() -> T) -> T {
        if self.keep_attention {
            save_attention_output(make)
        } else {
            make()
        }
    }

    /// Those of a stage with so many blocks.
    pub(crate) fn segments(self, num_blocks: usize) -> Vec<Segment> {
        let (again, group) = match self.blocks {
            None => (0, 1),
            Some(RecomputeBlocks::Uniform(group)) => (num_blocks, group.max(1)),
            Some(RecomputeBlocks::Block(first)) => (first.min(num_blocks), 1),
        };
        let groups = (0..again)
            .step_by(group)
            .map(|start| start..(start + group).min(again));
        let mut segments: Vec<_> = groups
            .map(|blocks| Segment {
                blocks,
                again: true,
            })
            .collect();
        if again < num_blocks {
            segments.push(Segment {
                blocks: again..num_blocks,
                again: false,
            });
        }
        segments
    }

    /// Whether backward computes a block of the last stage once more that predicts further tokens, behind
    /// `before` others: one at a time, from what the depth before ended in and the vectors of its tokens.
    pub(crate) fn is_behind(self, before: usize) -> bool {
        match self.blocks {
            None => false,
            Some(RecomputeBlocks::Uniform(_)) => true,
            Some(RecomputeBlocks::Block(first)) => before < first,
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

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
        #[case] again: &[(usize, usize)],
        #[case] kept: Option<(usize, usize)>,
    ) {
        let segment = |again| {
            move |(start, end)| Segment {
                blocks: start..end,
                again,
            }
        };
        let expected = again
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
}
