//! Runs a schedule without tensors: whether it ends, and when.

mod check;
mod machine;
mod timing;

use serde::{Deserialize, Serialize};

pub use timing::{Span, Timing};

use crate::{PipelineError, Schedule};

/// How long a rank takes for a pass of one micro-batch through one of its chunks, in any unit that
/// is whole (nanoseconds, say). A joint backward takes both halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Costs {
    /// A forward.
    pub forward: u64,
    /// The gradient of a stage's input.
    pub backward_input: u64,
    /// The gradient of a stage's weights.
    pub backward_weight: u64,
    /// A tensor that this rank sends.
    pub transfer: u64,
}

impl Costs {
    /// All passes take one unit and transfers nothing: how the papers draw and count.
    pub const UNIT: Costs = Costs {
        forward: 1,
        backward_input: 1,
        backward_weight: 1,
        transfer: 0,
    };

    /// What all three passes of a micro-batch take.
    pub fn step(self) -> u64 {
        self.forward + self.backward_input + self.backward_weight
    }
}

/// How transfers are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Links {
    /// A send and its receive begin when both ranks are there, and hold both up until they end.
    /// What works so works on any transport.
    ///
    /// With passes of one unit and transfers of none this costs nothing, but for interleaved
    /// schedules, where a send can find its receiver in the middle of a backward: 2 units a step at
    /// most, unless the ranks are 2, 5 or 8, where it happens again and again. There the time lost
    /// grows with the micro-batches (`2(v-1)(m-2)` on 2 ranks, less than `3(v-1)m` on 5 and 8) and
    /// interleaving is worth its while with posted receives only; Megatron-LM refuses 2 ranks
    /// without.
    Rendezvous,
    /// Receives are posted ahead and sends leave by themselves, one after another from a rank to
    /// another; a rank waits only where it computes with what has not arrived.
    PrePosted,
}

/// What [`Schedule::prove`] has found besides that all is well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proof {
    /// How many forwards each rank holds the insides of at most, until they are let go of by the
    /// gradients of the weights. One is a micro-batch in one chunk: of several chunks each is a part
    /// of what the rank computes. None in a schedule without backward.
    pub peak_activations: Vec<usize>,
}

impl Schedule {
    /// Proves that the schedule trains: every pass is there once, after what it needs; both ends of
    /// every transfer are there, and between two ranks in the same order; and all lists come to
    /// their ends, both under rendezvous and with posted receives.
    ///
    /// # Errors
    /// The first thing that is wrong; for a deadlock, who waits for whom.
    pub fn prove(&self) -> Result<Proof, PipelineError> {
        let proof = check::check(self)?;
        let costs = vec![Costs::UNIT; self.stages.num_ranks];
        for links in [Links::Rendezvous, Links::PrePosted] {
            machine::run(self, &costs, links)?;
        }
        Ok(proof)
    }

    /// When each pass happens, if rank r has `costs[r]`.
    ///
    /// # Errors
    /// The schedule is not sound, or there are not as many costs as ranks.
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
