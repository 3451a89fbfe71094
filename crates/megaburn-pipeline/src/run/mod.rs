//! Executes a rank's list of a schedule: what is computed, sent and received, and what is kept between.

mod deferred_wgrads;
mod p2p_communicator;
mod stage_input;

use std::collections::BTreeMap;

use burn::tensor::{DType, Device, Gradients, Tensor};
use megaburn_collective::CollectiveError;
use megaburn_kernels::DetachedOutput;

use crate::{Action, Message, Op, P2pGroups, Schedule};
use deferred_wgrads::DeferredWgrads;
use p2p_communicator::P2pCommunicator;
use stage_input::StageInput;

/// Which pass of which chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MicroBatchStep {
    /// Which of the rank's own chunks, from 0.
    pub chunk: usize,
    /// Which micro-batch, from 0.
    pub micro_batch: usize,
    /// Whether it is the last of its kind (forward, backward, weights' gradients) in this chunk.
    pub is_last: bool,
}

/// What a chunk's forward gives.
#[derive(Debug)]
pub enum Output {
    /// What the next stage takes.
    Stream(Tensor<3>),
    /// `[1]`: where backward begins.
    Loss(Tensor<1>),
    /// Nothing that anybody goes backward from.
    Nothing,
}

/// What a rank's chunks compute; [`run`] says when, and moves what goes from one stage to another.
pub trait StageExecutor {
    /// Why it may fail.
    type Error: From<CollectiveError>;

    /// The forward of a micro-batch, of what the stage before made of it; the first stage has its own
    /// input.
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

    /// The backward of a micro-batch, which is `run`: takes what parameters get of its gradients.
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

    /// Whether products that give weights their gradients are put off where passes
    /// [wait](megaburn_kernels::Spare), and computed beside waits: those of the same backward, and of other
    /// micro-batches' passes that follow. What is left of them is computed before the next backward, or where the
    /// schedule says; what they are made of is held until then. Last passes give their own gradients, all of them
    /// and no others; the first backward too, which shows how much there is.
    fn puts_off(&self) -> bool {
        false
    }

    /// The part of the backward that gives weights their gradients, which is `run`, where the schedule
    /// splits it off, or what is left of it where it was [put off](Self::puts_off).
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

/// How stages are joined.
#[derive(Clone, Debug)]
pub struct P2pSpec {
    /// Whom this rank sends to and receives from.
    pub neighbours: P2pGroups,
    /// Of what goes from stage to stage.
    pub shape: [usize; 3],
    /// Its element type.
    pub dtype: DType,
    /// Where it is, without autodiff.
    pub device: Device,
}

/// Does what `schedule` has for this rank.
///
/// An activation is let go when it was sent, and all that is kept of a pass when its backward is done.
/// On GPUs sends and receives run beside what is computed: each is started where the list has it, a receive
/// is waited for where it is needed, a send two passes later. No receive is started earlier: whatever
/// waits for the whole GPU (a kernel that is loaded, memory that is given back) waits for it too, and
/// the other rank may need something first that the list has in between. Where the list has them,
/// waiting for each is what was proven.
///
/// # Errors
/// Those of `chunks`; see also [`CollectiveError`].
/// # Collective
/// All ranks of the pipeline, with one schedule.
///
/// # Panics
/// If the schedule is not sound ([`Schedule::prove`]) or of another number of ranks.
pub fn run<C: StageExecutor>(
    schedule: &Schedule,
    wire: &P2pSpec,
    chunks: &mut C,
) -> Result<(), C::Error> {
    let group = wire.neighbours.group();
    let rank = group.rank();
    assert!(
        schedule.ranks.len() == group.size(),
        "a schedule of other ranks"
    );
    wire.neighbours.rendezvous(&wire.device)?;
    let actions = &schedule.ranks[rank];
    let mut passes = BTreeMap::new();
    for action in actions {
        *passes
            .entry((action.op as usize, action.chunk))
            .or_insert(0) += 1;
    }
    let mut runner = Runner {
        schedule,
        rank,
        left: passes,
        mail: P2pCommunicator::new(schedule, wire),
        kept: BTreeMap::new(),
        deferred_wgrads: DeferredWgrads::new(chunks.puts_off()),
        late: Vec::new(),
    };
    for (index, action) in actions.iter().enumerate() {
        runner.act(*action, &actions[index + 1..], chunks)?;
    }
    runner.deferred_wgrads.end();
    Ok(())
}

struct Runner<'a> {
    schedule: &'a Schedule,
    rank: usize,
    /// Passes to come, by operation and chunk.
    left: BTreeMap<(usize, usize), usize>,
    mail: P2pCommunicator<'a>,
    /// By chunk and micro-batch.
    kept: BTreeMap<(usize, usize), SavedForBackward>,
    deferred_wgrads: DeferredWgrads,
    /// Whose weights' gradients the schedule had before forwards that are computed first.
    late: Vec<MicroBatchStep>,
}

/// What backward needs of a forward.
struct SavedForBackward {
    inlet: Option<StageInput>,
    end: End,
}

enum End {
    Loss(Tensor<1>),
    DetachedOutput(DetachedOutput),
}

impl Runner<'_> {
    fn act<C: StageExecutor>(
        &mut self,
        action: Action,
        next: &[Action],
        chunks: &mut C,
    ) -> Result<(), C::Error> {
        if action.op.is_compute() && action.op != Op::Forward {
            let late = std::mem::take(&mut self.late);
            late.into_iter()
                .try_for_each(|pass| self.backward_weight(pass, chunks))?;
        }
        match action.op {
            Op::ReceiveActivation | Op::ReceiveGradient => Ok(self.mail.receive(action)?),
            Op::SendActivation | Op::SendGradient => Ok(self.mail.send(action)?),
            Op::Forward => self.forward(action, chunks),
            Op::Backward | Op::BackwardInput => self.backward(action, chunks),
            Op::BackwardWeight => {
                let pass = self.pass(action);
                let next = next.iter().find(|action| action.op.is_compute());
                let is_before_forward = next.is_some_and(|next| next.op == Op::Forward);
                if is_before_forward && self.deferred_wgrads.can_stay(pass) {
                    self.late.push(pass);
                    return Ok(());
                }
                self.backward_weight(pass, chunks)
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
        self.mail.end_sends();
        let input = match to_stage {
            0 => None,
            _ => Some(self.mail.take(Message {
                is_gradient: false,
                micro_batch,
                to_stage,
            })?),
        };
        let goes_back = self.schedule.kind.has_backward();
        let (input, inlet) = match input {
            Some(input) if goes_back => {
                let (input, inlet) = StageInput::of(input);
                (Some(input), Some(inlet))
            }
            input => (input, None),
        };
        let pass = self.pass(action);
        let output = self
            .deferred_wgrads
            .forward(pass, || chunks.forward(pass, input))?;
        let end = match output {
            Output::Stream(stream) => {
                let message = Message {
                    is_gradient: false,
                    micro_batch,
                    to_stage: to_stage + 1,
                };
                self.mail.send_local(message, stream.clone().inner());
                goes_back.then(|| End::DetachedOutput(DetachedOutput::of(stream)))
            }
            Output::Loss(loss) => goes_back.then_some(End::Loss(loss)),
            Output::Nothing => None,
        };
        if let Some(end) = end {
            self.kept
                .insert((chunk, micro_batch), SavedForBackward { inlet, end });
        }
        Ok(())
    }

    fn backward_weight<C: StageExecutor>(
        &mut self,
        pass: MicroBatchStep,
        chunks: &mut C,
    ) -> Result<(), C::Error> {
        let work = self
            .deferred_wgrads
            .take(pass)
            .expect("a schedule that was proven");
        chunks.backward_weight(pass, || work.compute())
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
        self.mail.end_sends();
        let is_split = op == Op::BackwardInput;
        if !is_split {
            // Before it waits for another stage.
            for (pass, work) in self.deferred_wgrads.take_left() {
                chunks.backward_weight(pass, || work.compute())?;
            }
        }
        let SavedForBackward { inlet, end } =
            self.kept.remove(&key).expect("a schedule that was proven");
        let gradient = match &end {
            End::Loss(_) => None,
            End::DetachedOutput(_) => Some(self.mail.take(Message {
                is_gradient: true,
                micro_batch,
                to_stage,
            })?),
        };
        let whole = move || match (end, gradient) {
            (End::DetachedOutput(outlet), Some(gradient)) => outlet.backward(gradient),
            (End::Loss(loss), _) => loss.backward(),
            (End::DetachedOutput(_), None) => unreachable!("it was taken"),
        };
        let pass = self.pass(action);
        let deferred_wgrads = &mut self.deferred_wgrads;
        chunks.backward(pass, || deferred_wgrads.backward(pass, is_split, whole))?;
        if let Some(inlet) = inlet {
            let gradient = inlet.gradient().expect("a stage's input is used");
            let message = Message {
                is_gradient: true,
                micro_batch,
                to_stage: to_stage - 1,
            };
            self.mail.send_local(message, gradient);
        }
        Ok(())
    }

    fn pass(&mut self, action: Action) -> MicroBatchStep {
        let Action {
            op,
            micro_batch,
            chunk,
        } = action;
        let left = self
            .left
            .get_mut(&(op as usize, chunk))
            .expect("it was counted");
        *left -= 1;
        MicroBatchStep {
            chunk,
            micro_batch,
            is_last: *left == 0,
        }
    }
}
