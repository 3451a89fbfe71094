use std::fmt;

use serde::{Deserialize, Serialize};

/// What a rank does with one micro-batch in one of its chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Op {
    /// The input of a forward comes from the rank with the stage before.
    ReceiveActivation,
    /// From a stage's input to its output; what the backward needs is kept.
    Forward,
    /// The output of a forward goes to the rank with the stage after.
    SendActivation,
    /// The gradient of a stage's output comes from the rank with the stage after.
    ReceiveGradient,
    /// Both halves of the backward at once.
    Backward,
    /// The gradient of a stage's input, which the stage before waits for.
    BackwardInput,
    /// The gradient of a stage's weights, which nobody waits for; lets go of what was kept.
    BackwardWeight,
    /// The gradient of a stage's input goes to the rank with the stage before.
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
            Op::BackwardInput => "backward for the input",
            Op::BackwardWeight => "backward for the weights",
            Op::SendGradient => "send of the gradient",
        }
    }
}

/// One entry of a rank's list. Which stage a chunk is, and which rank is at the other end of a
/// transfer, is [`Stages`](crate::Stages)' to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Action {
    /// What is done.
    pub op: Op,
    /// With which micro-batch, from 0.
    pub micro_batch: usize,
    /// In which of the rank's own chunks, from 0: that which sends, receives or computes.
    pub chunk: usize,
}

impl Action {
    /// `op` of a micro-batch in a chunk.
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

/// A tensor between two stages, named alike by the rank that sends it and the one that receives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Message {
    /// A gradient, which goes to the stage before; else an activation, which goes on.
    pub is_gradient: bool,
    /// Of which micro-batch.
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
