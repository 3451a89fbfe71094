//! Runs a schedule without tensors, to find whether it ends and when.

mod check;
mod machine;
mod prepared;
mod timing;

use serde::{Deserialize, Serialize};

pub use prepared::PreparedSchedule;
pub use timing::{Span, Timing};

use crate::{error::PipelineError, schedule::Schedule};

/// How long a rank takes for a pass of one micro-batch through one of its chunks, in any integer
/// unit (for example nanoseconds). A joint backward takes the sum of both halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Costs {
    /// Time of a forward.
    pub forward: u64,
    /// Time of the gradient of a stage's input.
    pub backward_input: u64,
    /// Time of the gradient of a stage's weights.
    pub backward_weight: u64,
    /// Time to send a tensor from this rank.
    pub transfer: u64,
}

impl Costs {
    /// All passes take one unit and transfers take none, as in the papers' figures and counts.
    pub const UNIT: Costs = Costs {
        forward: 1,
        backward_input: 1,
        backward_weight: 1,
        transfer: 0,
    };

    /// The time of all three passes of a micro-batch.
    pub fn step(self) -> u64 {
        self.forward + self.backward_input + self.backward_weight
    }
}

/// How transfers are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Links {
    /// A send and its receive begin when both ranks have reached them, and block both until they
    /// end. A schedule that works this way works on any transport.
    ///
    /// With passes of one unit and transfers of none, this costs nothing except in interleaved
    /// schedules, where a send can find its receiver in the middle of a backward. The cost is at
    /// most 2 units per step, unless there are 2, 5 or 8 ranks, where it recurs and grows with the
    /// micro-batches: `2(v-1)(m-2)` on 2 ranks, less than `3(v-1)m` on 5 and 8. There interleaving
    /// pays off only with posted receives; Megatron-LM refuses 2 ranks without them.
    Rendezvous,
    /// Receives are posted ahead and sends are asynchronous; those from one rank to another run one
    /// after the other. A rank waits only if it computes with a tensor that has not arrived.
    PrePosted,
}

/// Results of a successful [`Schedule::prove`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proof {
    /// The most forwards whose activations each rank holds at once; the gradients of the weights
    /// free them. One unit is a micro-batch in one chunk, so with several chunks it is a part of
    /// the rank's layers. 0 in a schedule without backward.
    pub peak_activations: Vec<usize>,
}

impl Schedule {
    /// Proves that the schedule trains: every pass is there once, after its dependencies; both ends
    /// of every transfer are there, and in the same order on both ranks; and all lists run to their
    /// ends, both under rendezvous and with posted receives.
    ///
    /// # Errors
    /// The first violation; for a deadlock, which rank waits for which.
    pub fn prove(&self) -> Result<Proof, PipelineError> {
        let proof = check::check(self)?;
        let costs = vec![Costs::UNIT; self.stages.num_ranks];
        for links in [Links::Rendezvous, Links::PrePosted] {
            machine::run(self, &costs, links)?;
        }
        Ok(proof)
    }

    /// Returns when each pass runs, if rank r has `costs[r]`.
    ///
    /// # Errors
    /// The schedule is not sound, or the number of costs differs from the number of ranks.
    pub fn simulate(&self, costs: &[Costs], links: Links) -> Result<Timing, PipelineError> {
        check::check(self)?;
        let found = costs.len();
        let expected = self.stages.num_ranks;
        if found != expected {
            return Err(PipelineError::Costs { found, expected });
        }
        machine::run(self, costs, links)
    }
}
