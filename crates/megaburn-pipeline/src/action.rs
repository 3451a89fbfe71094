use std::fmt;

use serde::{Deserialize, Serialize};

/// What a rank does with one micro-batch in one of its chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Op {
    /// Receives the input of a forward from the rank of the previous stage.
    ReceiveActivation,
    /// Computes a stage's output from its input and saves what the backward needs.
    Forward,
    /// Sends the output of a forward to the rank of the next stage.
    SendActivation,
    /// Receives the gradient of a stage's output from the rank of the next stage.
    ReceiveGradient,
    /// Computes both halves of the backward at once.
    Backward,
    /// Computes the gradient of a stage's input, for which the previous stage waits.
    BackwardInput,
    /// Computes the gradient of a stage's weights, for which no stage waits, and frees what was
    /// saved for backward.
    BackwardWeight,
    /// Sends the gradient of a stage's input to the rank of the previous stage.
    SendGradient,
}

impl Op {
    /// Every operation.
    pub const ALL: [Op; 8] = [
        Op::ReceiveActivation,
        Op::Forward,
        Op::SendActivation,
        Op::ReceiveGradient,
        Op::Backward,
        Op::BackwardInput,
        Op::BackwardWeight,
        Op::SendGradient,
    ];

    /// Whether it computes; the others move a tensor between two ranks.
    pub fn is_compute(self) -> bool {
        matches!(
            self,
            Op::Forward | Op::Backward | Op::BackwardInput | Op::BackwardWeight
        )
    }

    fn words(self) -> &'static str {
        match self {
            Op::ReceiveActivation => "receive of the activation",
            Op::Forward => "forward",
            Op::SendActivation => "send of the activation",
            Op::ReceiveGradient => "receive of the gradient",
            Op::Backward => "backward",
            Op::BackwardInput => "data gradient",
            Op::BackwardWeight => "weight gradient",
            Op::SendGradient => "send of the gradient",
        }
    }
}

/// One entry of a rank's list. [`Stages`](crate::Stages) gives the stage of a chunk and the rank at
/// the other end of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Action {
    /// The operation.
    pub op: Op,
    /// The micro-batch, from 0.
    pub micro_batch: usize,
    /// The rank's own chunk that sends, receives or computes, from 0.
    pub chunk: usize,
}

impl Action {
    /// Creates the action `op` on a micro-batch in a chunk.
    pub fn new(op: Op, micro_batch: usize, chunk: usize) -> Self {
        Self {
            op,
            micro_batch,
            chunk,
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            op,
            micro_batch,
            chunk,
        } = self;
        write!(
            f,
            "{} of micro-batch {micro_batch} in chunk {chunk}",
            op.words()
        )
    }
}

/// A tensor between two stages. The sending and the receiving rank name it by the same value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Message {
    /// True for a gradient, which goes to the previous stage; false for an activation, which goes
    /// to the next.
    pub is_gradient: bool,
    /// The micro-batch.
    pub micro_batch: usize,
    /// The stage that needs it.
    pub to_stage: usize,
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.is_gradient {
            "gradient"
        } else {
            "activation"
        };
        write!(
            f,
            "{what} of micro-batch {} for stage {}",
            self.micro_batch, self.to_stage
        )
    }
}
