//! Executes a rank's list of a schedule: computes, sends, receives, and keeps what is saved for
//! backward.

mod p2p_communicator;
mod stage_input;

use std::collections::BTreeMap;

use burn::tensor::{Gradients, Tensor};
use megaburn_autograd::{DetachedOutput, WgradQueue};
use megaburn_collective::CollectiveError;

use crate::{
    action::{Action, Message, Op},
    schedule::Schedule,
};
use p2p_communicator::P2pCommunicator;
pub use p2p_communicator::P2pSpec;
use stage_input::StageInput;

/// Identifies one pass of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MicroBatchStep {
    /// The rank's own chunk, from 0.
    pub chunk: usize,
    /// The micro-batch, from 0.
    pub micro_batch: usize,
    /// Whether it is the last of its kind (forward, backward, weights' gradients) in this chunk.
    pub is_last: bool,
}

/// The result of a chunk's forward.
#[derive(Debug)]
pub enum Output {
    /// The input of the next stage.
    Stream(Tensor<3>),
    /// `[1]`: the loss from which backward begins.
    Loss(Tensor<1>),
    /// Nothing that has a backward.
    Nothing,
}

/// The computation of a rank's chunks. [`run`] decides when to call it and moves tensors between
/// stages.
pub trait StageExecutor {
    /// The error type.
    type Error: From<CollectiveError>;

    /// Runs the forward of a micro-batch on the output of the previous stage; the first stage has
    /// its own input.
    ///
    /// # Shapes
    /// As [`P2pSpec::shape`].
    /// # Errors
    /// The caller's; they end the step.
    fn forward(
        &mut self,
        pass: MicroBatchStep,
        input: Option<Tensor<3>>,
    ) -> Result<Output, Self::Error>;

    /// Runs the backward of a micro-batch by calling `run`, and takes the gradients of the
    /// parameters.
    ///
    /// # Errors
    /// The caller's.
    fn backward(
        &mut self,
        pass: MicroBatchStep,
        run: impl FnOnce() -> Gradients,
    ) -> Result<(), Self::Error> {
        let _ = pass;
        drop(run());
        Ok(())
    }

    /// The part of the backward that computes weight gradients, which is `run`, where the schedule
    /// splits it off.
    ///
    /// # Errors
    /// The caller's.
    fn backward_weight(
        &mut self,
        pass: MicroBatchStep,
        run: impl FnOnce(),
    ) -> Result<(), Self::Error> {
        let _ = pass;
        run();
        Ok(())
    }
}

/// Executes this rank's list of `schedule`.
///
/// An activation is freed when it was sent, and everything saved for a pass when its backward is
/// done. On GPUs sends and receives overlap with computation: each is started at its place in the
/// list, a receive is waited for where it is needed, and a send two passes later.
///
/// No receive is started earlier. Operations that wait for the full GPU (loading a kernel, freeing
/// memory) would also wait for the receive, while the other rank may first need something that the
/// list has in between. Waiting for each transfer at its place in the list is what was proven to be
/// free of deadlocks.
///
/// # Errors
/// The errors of `chunks`; see also [`CollectiveError`].
/// # Collective
/// All ranks of the pipeline, with the same schedule.
///
/// # Panics
/// If the schedule is not sound ([`Schedule::prove`]) or has another number of ranks.
pub fn run<C: StageExecutor>(
    schedule: &Schedule,
    spec: &P2pSpec,
    chunks: &mut C,
) -> Result<(), C::Error> {
    let group = spec.neighbours.group();
    let rank = group.rank();
    assert!(
        schedule.ranks.len() == group.size(),
        "the number of ranks in the schedule and in the group differ"
    );
    spec.neighbours.rendezvous(&spec.device)?;
    let actions = &schedule.ranks[rank];
    let mut remaining = BTreeMap::new();
    for action in actions {
        *remaining
            .entry((action.op as usize, action.chunk))
            .or_insert(0) += 1;
    }
    let mut runner = Runner {
        schedule,
        rank,
        remaining,
        p2p: P2pCommunicator::new(schedule, spec),
        saved: BTreeMap::new(),
        backward_weight: BTreeMap::new(),
    };
    actions
        .iter()
        .try_for_each(|action| runner.execute(*action, chunks))
}

struct Runner<'a> {
    schedule: &'a Schedule,
    rank: usize,
    /// The number of remaining passes, by operation and chunk.
    remaining: BTreeMap<(usize, usize), usize>,
    p2p: P2pCommunicator<'a>,
    /// By chunk and micro-batch.
    saved: BTreeMap<(usize, usize), SavedForBackward>,
    /// Weight gradients that split backwards have deferred, likewise.
    backward_weight: BTreeMap<(usize, usize), WgradQueue>,
}

/// What backward needs of a forward.
struct SavedForBackward {
    stage_input: Option<StageInput>,
    output: SavedOutput,
}

/// The output from which backward begins.
enum SavedOutput {
    /// Its gradient comes from the next stage.
    Stream(DetachedOutput),
    Loss(Tensor<1>),
}

impl Runner<'_> {
    fn execute<C: StageExecutor>(
        &mut self,
        action: Action,
        chunks: &mut C,
    ) -> Result<(), C::Error> {
        match action.op {
            Op::ReceiveActivation | Op::ReceiveGradient => Ok(self.p2p.receive(action)?),
            Op::SendActivation | Op::SendGradient => Ok(self.p2p.send(action)?),
            Op::Forward => self.forward(action, chunks),
            Op::Backward | Op::BackwardInput => self.backward(action, chunks),
            Op::BackwardWeight => {
                let wgrads = self
                    .backward_weight
                    .remove(&(action.chunk, action.micro_batch));
                let wgrads = wgrads.expect("the schedule was validated");
                chunks.backward_weight(self.pass(action), || wgrads.compute())
            }
        }
    }

    fn forward<C: StageExecutor>(
        &mut self,
        action: Action,
        chunks: &mut C,
    ) -> Result<(), C::Error> {
        let Action {
            micro_batch, chunk, ..
        } = action;
        let stages = self.schedule.stages;
        let to_stage = stages.stage(self.rank, chunk);
        self.p2p.end_sends();
        let input = match to_stage {
            0 => None,
            _ => Some(self.p2p.take(Message {
                is_gradient: false,
                micro_batch,
                to_stage,
            })),
        };
        let has_backward = self.schedule.kind.has_backward();
        let (input, stage_input) = match input {
            Some(input) if has_backward => {
                let (input, stage_input) = StageInput::of(input);
                (Some(input), Some(stage_input))
            }
            input => (input, None),
        };
        let output = match chunks.forward(self.pass(action), input)? {
            Output::Stream(stream) => {
                let message = Message {
                    is_gradient: false,
                    micro_batch,
                    to_stage: to_stage + 1,
                };
                self.p2p.deliver(message, stream.clone().inner());
                has_backward.then(|| SavedOutput::Stream(DetachedOutput::of(stream)))
            }
            Output::Loss(loss) => has_backward.then_some(SavedOutput::Loss(loss)),
            Output::Nothing => None,
        };
        if let Some(output) = output {
            let saved = SavedForBackward {
                stage_input,
                output,
            };
            self.saved.insert((chunk, micro_batch), saved);
        }
        Ok(())
    }

    fn backward<C: StageExecutor>(
        &mut self,
        action: Action,
        chunks: &mut C,
    ) -> Result<(), C::Error> {
        let Action {
            op,
            micro_batch,
            chunk,
        } = action;
        let to_stage = self.schedule.stages.stage(self.rank, chunk);
        let key = (chunk, micro_batch);
        self.p2p.end_sends();
        let SavedForBackward {
            stage_input,
            output,
        } = self.saved.remove(&key).expect("the schedule was validated");
        let gradient = match &output {
            SavedOutput::Loss(_) => None,
            SavedOutput::Stream(_) => Some(self.p2p.take(Message {
                is_gradient: true,
                micro_batch,
                to_stage,
            })),
        };
        let run_backward = move || match (output, gradient) {
            (SavedOutput::Stream(stream), Some(gradient)) => stream.backward(gradient),
            (SavedOutput::Loss(loss), _) => loss.backward(),
            (SavedOutput::Stream(_), None) => unreachable!("it was taken"),
        };
        let pass = self.pass(action);
        if op == Op::BackwardInput {
            let wgrads = WgradQueue::default();
            chunks.backward(pass, || wgrads.defer(run_backward))?;
            self.backward_weight.insert(key, wgrads);
        } else {
            chunks.backward(pass, run_backward)?;
        }
        if let Some(stage_input) = stage_input {
            let gradient = stage_input.gradient().expect("the stage uses its input");
            let message = Message {
                is_gradient: true,
                micro_batch,
                to_stage: to_stage - 1,
            };
            self.p2p.deliver(message, gradient);
        }
        Ok(())
    }

    fn pass(&mut self, action: Action) -> MicroBatchStep {
        let Action {
            op,
            micro_batch,
            chunk,
        } = action;
        let remaining = self
            .remaining
            .get_mut(&(op as usize, chunk))
            .expect("every pass was counted");
        *remaining -= 1;
        MicroBatchStep {
            chunk,
            micro_batch,
            is_last: *remaining == 0,
        }
    }
}
