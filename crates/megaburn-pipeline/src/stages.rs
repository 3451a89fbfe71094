use serde::{Deserialize, Serialize};

use crate::action::{Action, Message, Op};

/// How the stages of a model are assigned to the ranks of a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Placement {
    /// Round robin: chunk c of rank r is stage `c * pp + r` (Megatron-LM's interleaving).
    Loop,
    /// Back and forth: even chunks go down the ranks and odd chunks come back. So with two chunks,
    /// rank r has stages `r` and `2 * pp - 1 - r`, and the first rank has both the embedding and
    /// the loss (Qi et al., arXiv 2405.15362).
    Vee,
}

impl Placement {
    /// The name in command lines and files.
    pub fn name(self) -> &'static str {
        match self {
            Placement::Loop => "loop",
            Placement::Vee => "vee",
        }
    }
}

/// The stages of a pipeline and their assignment to ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stages {
    /// The number of ranks in the pipeline.
    pub num_ranks: usize,
    /// The number of stages per rank.
    pub num_chunks: usize,
    /// The assignment of stages to ranks.
    pub placement: Placement,
}

impl Stages {
    /// The number of stages of the pipeline.
    pub fn num_stages(self) -> usize {
        self.num_ranks * self.num_chunks
    }

    /// The stage of chunk `chunk` on rank `rank`.
    pub fn stage(self, rank: usize, chunk: usize) -> usize {
        let comes_back = self.placement == Placement::Vee && chunk % 2 == 1;
        chunk * self.num_ranks
            + if comes_back {
                self.num_ranks - 1 - rank
            } else {
                rank
            }
    }

    /// The rank that has a stage.
    pub fn rank_of(self, stage: usize) -> usize {
        let chunk = stage / self.num_ranks;
        let place = stage % self.num_ranks;
        let comes_back = self.placement == Placement::Vee && chunk % 2 == 1;
        if comes_back {
            self.num_ranks - 1 - place
        } else {
            place
        }
    }

    /// The chunk of its rank that a stage is.
    pub fn chunk_of(self, stage: usize) -> usize {
        stage / self.num_ranks
    }

    /// The stage whose output a chunk takes; `None` for the first stage.
    pub fn before(self, rank: usize, chunk: usize) -> Option<usize> {
        self.stage(rank, chunk).checked_sub(1)
    }

    /// The stage that takes a chunk's output; `None` for the last stage.
    pub fn after(self, rank: usize, chunk: usize) -> Option<usize> {
        Some(self.stage(rank, chunk) + 1).filter(|stage| *stage < self.num_stages())
    }

    /// The rank at the other end of a transfer. `None` for computing actions, for a transfer that
    /// would leave the pipeline, and between two stages of the same rank, which need no send.
    pub fn peer(self, rank: usize, action: Action) -> Option<usize> {
        let other = match action.op {
            Op::ReceiveActivation | Op::SendGradient => self.before(rank, action.chunk),
            Op::SendActivation | Op::ReceiveGradient => self.after(rank, action.chunk),
            _ => None,
        };
        other
            .map(|stage| self.rank_of(stage))
            .filter(|peer| *peer != rank)
    }

    /// The message of a transfer; `None` if [`Self::peer`] is `None`.
    pub fn message(self, rank: usize, action: Action) -> Option<Message> {
        self.peer(rank, action)?;
        let Action {
            op,
            micro_batch,
            chunk,
        } = action;
        let own = self.stage(rank, chunk);
        let to_stage = match op {
            Op::SendActivation => own + 1,
            Op::SendGradient => own - 1,
            _ => own,
        };
        let is_gradient = matches!(op, Op::SendGradient | Op::ReceiveGradient);
        Some(Message {
            is_gradient,
            micro_batch,
            to_stage,
        })
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    fn every_stage_is_where_its_rank_says(
        #[values(Placement::Loop, Placement::Vee)] placement: Placement,
    ) {
        for (num_ranks, num_chunks) in [(1, 1), (1, 3), (2, 2), (4, 2), (3, 4), (8, 3)] {
            let stages = Stages {
                num_ranks,
                num_chunks,
                placement,
            };
            let mut seen = Vec::new();
            for rank in 0..num_ranks {
                for chunk in 0..num_chunks {
                    let stage = stages.stage(rank, chunk);
                    assert_eq!(
                        (stages.rank_of(stage), stages.chunk_of(stage)),
                        (rank, chunk)
                    );
                    seen.push(stage);
                }
            }
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..stages.num_stages()));
        }
    }

    #[test]
    fn a_rank_in_the_bend_of_a_vee_sends_nothing_to_itself() {
        let stages = Stages {
            num_ranks: 4,
            num_chunks: 2,
            placement: Placement::Vee,
        };
        let per_rank: Vec<_> = (0..4).map(|r| [0, 1].map(|c| stages.stage(r, c))).collect();
        assert_eq!(per_rank, [[0, 7], [1, 6], [2, 5], [3, 4]]);
        assert_eq!(stages.peer(3, Action::new(Op::SendActivation, 0, 0)), None);
        assert_eq!(
            stages.peer(3, Action::new(Op::SendActivation, 0, 1)),
            Some(2)
        );
        assert_eq!(stages.peer(0, Action::new(Op::SendActivation, 0, 1)), None);
        assert_eq!(
            stages.peer(0, Action::new(Op::ReceiveGradient, 0, 0)),
            Some(1)
        );
    }

    #[test]
    fn both_ends_of_a_transfer_name_one_message() {
        let stages = Stages {
            num_ranks: 2,
            num_chunks: 2,
            placement: Placement::Loop,
        };
        let sent = stages.message(1, Action::new(Op::SendActivation, 5, 0));
        assert_eq!(
            sent,
            stages.message(0, Action::new(Op::ReceiveActivation, 5, 1))
        );
        assert_eq!(
            sent,
            Some(Message {
                is_gradient: false,
                micro_batch: 5,
                to_stage: 2
            })
        );
        let sent = stages.message(0, Action::new(Op::SendGradient, 5, 1));
        assert_eq!(
            sent,
            stages.message(1, Action::new(Op::ReceiveGradient, 5, 0))
        );
    }
}
