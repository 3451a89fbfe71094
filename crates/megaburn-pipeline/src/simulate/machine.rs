//! Simulates ranks that work through their lists.

use std::collections::{BTreeMap, HashMap};

use super::{Costs, Links, Span, Timing};
use crate::{
    action::{Action, Message, Op},
    error::{PipelineError, Waiting},
    schedule::Schedule,
};

/// Runs a schedule that passed [`check`](super::check::check).
pub(super) fn run(
    schedule: &Schedule,
    costs: &[Costs],
    links: Links,
) -> Result<Timing, PipelineError> {
    let num_ranks = schedule.ranks.len();
    let mut machine = Machine {
        schedule,
        costs,
        links,
        at: vec![0; num_ranks],
        clocks: vec![0; num_ranks],
        arrived: HashMap::new(),
        busy_until: BTreeMap::new(),
        spans: vec![Vec::new(); num_ranks],
    };
    // The progress of one rank never blocks another, so the order of the visits does not matter.
    loop {
        let mut has_moved = false;
        let mut waiting = Vec::new();
        for rank in 0..num_ranks {
            loop {
                match machine.step(rank) {
                    Step::Done => has_moved = true,
                    Step::Waits(found) => {
                        waiting.push(found);
                        break;
                    }
                    Step::AtEnd => break,
                }
            }
        }
        if waiting.is_empty() {
            return Ok(Timing {
                ranks: machine.spans,
            });
        }
        if !has_moved {
            return Err(PipelineError::Deadlock { waiting });
        }
    }
}

enum Step {
    Done,
    Waits(Waiting),
    AtEnd,
}

struct Machine<'a> {
    schedule: &'a Schedule,
    costs: &'a [Costs],
    links: Links,
    /// Each rank's position in its list, and the time at which it completed the previous action.
    at: Vec<usize>,
    clocks: Vec<u64>,
    /// The time at which each message arrived.
    arrived: HashMap<Message, u64>,
    /// With posted receives: the time until which the link from one rank to another is busy.
    busy_until: BTreeMap<(usize, usize), u64>,
    spans: Vec<Vec<Span>>,
}

impl Machine<'_> {
    /// Executes the next action of a rank, if it is possible.
    fn step(&mut self, rank: usize) -> Step {
        let Some(&action) = self.schedule.ranks[rank].get(self.at[rank]) else {
            return Step::AtEnd;
        };
        let held_up_by = match (action.op, self.links) {
            (op, _) if op.is_compute() => self.compute(rank, action),
            (_, Links::Rendezvous) => self.meet(rank, action),
            (Op::SendActivation | Op::SendGradient, Links::PrePosted) => self.post(rank, action),
            (_, Links::PrePosted) => None,
        };
        if let Some(for_rank) = held_up_by {
            return Step::Waits(Waiting {
                rank,
                index: self.at[rank],
                action,
                for_rank,
            });
        }
        self.at[rank] += 1;
        Step::Done
    }

    /// Computes, or returns the rank that has not yet sent the input.
    fn compute(&mut self, rank: usize, action: Action) -> Option<usize> {
        let receive = match action.op {
            Op::Forward => Op::ReceiveActivation,
            _ => Op::ReceiveGradient,
        };
        let received = Action {
            op: receive,
            ..action
        };
        let stages = self.schedule.stages;
        let mut start = self.clocks[rank];
        // `received` names no message for the weights' gradient: it uses what the input's gradient
        // received.
        if let Some(message) = stages.message(rank, received) {
            match self.arrived.get(&message) {
                Some(&arrived) => start = start.max(arrived),
                None => return stages.peer(rank, received),
            }
        }
        let costs = self.costs[rank];
        let end = start
            + match action.op {
                Op::Forward => costs.forward,
                Op::BackwardInput => costs.backward_input,
                Op::BackwardWeight => costs.backward_weight,
                _ => costs.backward_input + costs.backward_weight,
            };
        self.clocks[rank] = end;
        self.spans[rank].push(Span { action, start, end });
        None
    }

    /// Transfers if the other rank has reached its end of the same transfer; otherwise returns that
    /// rank.
    fn meet(&mut self, rank: usize, action: Action) -> Option<usize> {
        let stages = self.schedule.stages;
        let peer = stages.peer(rank, action)?;
        let message = stages.message(rank, action)?;
        let at_peer = self.schedule.ranks[peer].get(self.at[peer]);
        if at_peer.and_then(|action| stages.message(peer, *action)) != Some(message) {
            return Some(peer);
        }
        let sender = match action.op {
            Op::SendActivation | Op::SendGradient => rank,
            _ => peer,
        };
        let end = self.clocks[rank].max(self.clocks[peer]) + self.costs[sender].transfer;
        self.clocks[rank] = end;
        self.clocks[peer] = end;
        self.at[peer] += 1;
        self.arrived.insert(message, end);
        None
    }

    /// Sends without waiting.
    fn post(&mut self, rank: usize, action: Action) -> Option<usize> {
        let stages = self.schedule.stages;
        let peer = stages.peer(rank, action)?;
        let message = stages.message(rank, action)?;
        let free = self.busy_until.entry((rank, peer)).or_insert(0);
        *free = (*free).max(self.clocks[rank]) + self.costs[rank].transfer;
        self.arrived.insert(message, *free);
        None
    }
}
