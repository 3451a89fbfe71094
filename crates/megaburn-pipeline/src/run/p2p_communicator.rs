use std::collections::{BTreeMap, VecDeque};

use burn::tensor::{DType, Device, Tensor};
use megaburn_collective::{
    CollectiveError, Lane,
    tensors::{self, Work},
};

use crate::{
    action::{Action, Message},
    p2p_groups::P2pGroups,
    schedule::Schedule,
};

/// How stages are connected.
#[derive(Clone, Debug)]
pub struct P2pSpec {
    /// The groups to the ranks with which this rank exchanges tensors.
    pub neighbours: P2pGroups,
    /// The shape of the tensors between stages.
    pub shape: [usize; 3],
    /// The element type of these tensors.
    pub dtype: DType,
    /// The device of these tensors, without autodiff.
    pub device: Device,
}

/// The number of passes that a send may overlap with before computation waits for it. In the steady
/// state of 1F1B, two passes end where this rank sends in the same direction again: until then the
/// other rank has the time of a full micro-batch to receive, and few sent activations are held.
const MAX_PASSES_IN_FLIGHT: usize = 2;

/// Tensors between stages, on their way to a pass of this rank or to another rank.
pub(super) struct P2pCommunicator<'a> {
    schedule: &'a Schedule,
    spec: &'a P2pSpec,
    rank: usize,
    receiving: BTreeMap<Message, Work<Tensor<3>>>,
    /// Inputs of passes of this rank.
    arrived: BTreeMap<Message, Tensor<3>>,
    /// Tensors that are to be sent.
    outgoing: BTreeMap<Message, Tensor<3>>,
    /// Sends in flight, each with the number of the pass in which it started.
    sending: VecDeque<(usize, Work<()>)>,
    /// The number of passes so far.
    num_passes: usize,
}

impl<'a> P2pCommunicator<'a> {
    pub(super) fn new(schedule: &'a Schedule, spec: &'a P2pSpec) -> Self {
        let rank = spec.neighbours.group().rank();
        let (receiving, arrived, outgoing, sending) = Default::default();
        Self {
            schedule,
            spec,
            rank,
            receiving,
            arrived,
            outgoing,
            sending,
            num_passes: 0,
        }
    }

    /// Hands a tensor to a stage: to a later pass of this rank, or to the send that follows.
    pub(super) fn deliver(&mut self, message: Message, x: Tensor<3>) {
        let is_here = self.schedule.stages.rank_of(message.to_stage) == self.rank;
        let to = if is_here {
            &mut self.arrived
        } else {
            &mut self.outgoing
        };
        to.insert(message, x.cast(self.spec.dtype));
    }

    /// Takes the input of a pass, waiting for its receive.
    pub(super) fn take(&mut self, message: Message) -> Tensor<3> {
        match self.receiving.remove(&message) {
            Some(work) => work.wait(),
            None => self
                .arrived
                .remove(&message)
                .expect("the schedule was validated"),
        }
    }

    /// Starts a receive; on the host it is complete when this returns.
    pub(super) fn receive(&mut self, action: Action) -> Result<(), CollectiveError> {
        let P2pSpec {
            neighbours,
            shape,
            dtype,
            device,
        } = self.spec;
        let (peer, message) = self.transfer(action);
        let (group, from) = neighbours.from(peer);
        let work = tensors::recv(*shape, (device, *dtype), from, group, Lane::Overlapped)?;
        self.receiving.insert(message, work);
        Ok(())
    }

    pub(super) fn send(&mut self, action: Action) -> Result<(), CollectiveError> {
        let (peer, message) = self.transfer(action);
        let x = self
            .outgoing
            .remove(&message)
            .expect("the schedule was validated");
        let (group, to) = self.spec.neighbours.to(peer);
        let work = tensors::send(x, to, group, Lane::Overlapped)?;
        self.sending.push_back((self.num_passes, work));
        Ok(())
    }

    /// Called before a pass: waits for sends that were started more than [`MAX_PASSES_IN_FLIGHT`]
    /// passes ago.
    pub(super) fn end_sends(&mut self) {
        self.num_passes += 1;
        let is_due =
            |(started, _): &mut (usize, _)| *started + MAX_PASSES_IN_FLIGHT < self.num_passes;
        while let Some((_, work)) = self.sending.pop_front_if(is_due) {
            work.wait();
        }
    }

    fn transfer(&self, action: Action) -> (usize, Message) {
        let stages = self.schedule.stages;
        let both = stages
            .peer(self.rank, action)
            .zip(stages.message(self.rank, action));
        both.expect("the schedule was validated")
    }
}
