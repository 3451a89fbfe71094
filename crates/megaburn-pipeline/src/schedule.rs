use serde::{Deserialize, Serialize};

use crate::{Action, ScheduleKind, Stages};

/// What every rank of a pipeline does in one step, in order.
///
/// A value to be looked at, stored and changed; [`Schedule::prove`] says whether it is sound.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// What it was built as.
    pub kind: ScheduleKind,
    /// What the chunks of a rank are.
    pub stages: Stages,
    /// Micro-batches of the step.
    pub num_micro_batches: usize,
    /// The list of each rank.
    pub ranks: Vec<Vec<Action>>,
}
