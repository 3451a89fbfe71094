//! Context parallelism: attention over sequences that are split over ranks.
//!
//! Each rank holds two chunks of each sequence ([`Zigzag`]), one from the front and one from the
//! back. All layers except attention work token by token. For attention, ranks exchange keys and
//! values ([`ContextComm`]), and the gradients travel back the same way.
//!
//! Source: Liu et al. (2023), "Ring Attention", <https://arxiv.org/abs/2310.01889>; Jacobs et al.
//! (2023), "DeepSpeed Ulysses", <https://arxiv.org/abs/2309.14509>; Fang & Zhao (2024), "USP", for
//! both at once, <https://arxiv.org/abs/2405.07719>; Megatron-LM `--context-parallel-size`,
//! `--cp-comm-type`.

mod all_gather;
mod attend;
mod comm;
mod heads;
mod hybrid;
mod mask;
mod order;
mod packed_batch;
mod part_attention;
mod parts;
mod prefill;
mod ring;

use megaburn_collective::{Group, region::unwrap_collective};
use megaburn_mesh::Zigzag;

pub(crate) use attend::context_attention;
pub use comm::ContextComm;
pub use hybrid::HybridContextParallel;
pub(crate) use mask::Mask;
pub use mask::PackedDocuments;
pub use packed_batch::ContextShare;
pub use prefill::Segment;
pub(crate) use prefill::{PackedShare, Piece};

use crate::error::ParallelError;

/// The ranks that share each sequence, and how they exchange keys and values.
///
/// Source: Megatron-LM `--context-parallel-size`; Liu et al. (2023), "Ring Attention",
/// <https://arxiv.org/abs/2310.01889>; Fang & Zhao (2024), "USP",
/// <https://arxiv.org/abs/2405.07719>, for heads and sequence at once.
#[derive(Clone, Debug)]
pub struct ContextParallel {
    group: Group,
    /// The neighbours over which heads are split.
    heads: Group,
    /// The ranks across those neighbours. Each holds two chunks of the sequence, for its share of
    /// the heads.
    sequence: Group,
    comm: ContextComm,
}

impl ContextParallel {
    /// Creates the layout for the ranks of `group`, which are in the order of the sequence's front
    /// chunks.
    ///
    /// # Errors
    /// The group size of a hierarchy does not divide the ranks.
    /// # Collective
    /// Nothing is sent. Layers with the same exchange should share one instance, and thereby its
    /// communicators.
    pub fn new(group: &Group, comm: ContextComm) -> Result<Self, ParallelError> {
        let rank = group.rank();
        let ranks = group.size();
        comm.check(ranks, [0, 0])?;
        let low = comm.low(ranks);
        let of = |name: &str, members: Vec<usize>| {
            if members.len() == ranks {
                Ok(group.clone())
            } else {
                group.subgroup(&format!("{} {name}", group.name()), &members)
            }
        };
        let members = group.members();
        let first = rank - rank % low;
        Ok(Self {
            group: group.clone(),
            heads: of("a2a", members[first..first + low].to_vec())?,
            sequence: of(
                "p2p",
                members
                    .iter()
                    .copied()
                    .skip(rank % low)
                    .step_by(low)
                    .collect(),
            )?,
            comm,
        })
    }

    /// Context parallelism on a single rank that holds full sequences.
    pub fn none() -> Self {
        let one = Group::single(0);
        Self {
            group: one.clone(),
            heads: one.clone(),
            sequence: one,
            comm: ContextComm::P2p,
        }
    }

    /// Number of ranks that share a sequence.
    pub fn num_ranks(&self) -> usize {
        self.group.size()
    }

    /// How the ranks exchange keys and values.
    pub fn comm(&self) -> ContextComm {
        self.comm
    }

    /// The chunks of each sequence that this rank holds.
    pub fn zigzag(&self) -> Zigzag {
        Zigzag::new(self.group.rank(), self.group.size())
    }

    /// Index of the first head that this rank attends with, of the `heads` that it computes.
    pub(crate) fn first_head(&self, heads: usize) -> usize {
        self.heads.rank() * (heads / self.heads.size())
    }

    /// The part of the sequence that this rank attends from, after heads were exchanged for
    /// sequence.
    fn sequence_chunk(&self) -> Zigzag {
        Zigzag::new(self.sequence.rank(), self.sequence.size())
    }
}
