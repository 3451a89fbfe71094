use serde::{Deserialize, Serialize};

use crate::{action::Action, kind::ScheduleKind, stages::Stages};

/// What every rank of a pipeline does in one step, in order.
///
/// It is plain data that can be inspected, stored and changed; [`Schedule::prove`] checks whether
/// it is sound.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// The kind as which it was built.
    pub kind: ScheduleKind,
    /// The stages, and their assignment to the chunks of ranks.
    pub stages: Stages,
    /// The number of micro-batches of the step.
    pub num_micro_batches: usize,
    /// The list of actions of each rank.
    pub ranks: Vec<Vec<Action>>,
}
