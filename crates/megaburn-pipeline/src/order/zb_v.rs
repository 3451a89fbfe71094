use std::collections::VecDeque;

use super::{backward_input, backward_weight, forward};
use crate::action::{Action, Op};

/// Chunk 0 goes down the ranks, chunk 1 comes back up.
const DOWN: usize = 0;
const UP: usize = 1;

/// The handcrafted order of arXiv 2401.10241, section 6, in the phases of PyTorch's
/// `ScheduleZBVZeroBubble`.
///
/// The phases need two micro-batches per rank; with fewer, actions of surplus micro-batches are
/// removed.
pub(super) fn order(rank: usize, num_ranks: usize, num_micro_batches: usize) -> Vec<Action> {
    let mut phases = Phases::default();
    let all = num_micro_batches.max(2 * num_ranks);
    // Warm-up: start forwards down until the first micro-batch is back.
    for _ in 0..2 * (num_ranks - rank) - 1 {
        phases.forward(DOWN);
    }
    for _ in 0..rank {
        phases.forward(UP);
        phases.forward(DOWN);
    }
    // Compute the forward and the backward of each micro-batch that is back.
    for _ in rank..num_ranks {
        phases.forward(UP);
        phases.backward(UP);
        phases.weight(UP);
    }
    // Steady state: alternate the six kinds of pass.
    while phases.next[UP].forward < all {
        if phases.next[DOWN].forward < all {
            phases.forward(DOWN);
        }
        phases.backward(DOWN);
        phases.weight(DOWN);
        phases.forward(UP);
        phases.backward(UP);
        phases.weight(UP);
    }
    // Cool-down: weight gradients wait until the last input gradients are computed.
    for _ in 0..rank {
        phases.backward(DOWN);
        phases.backward(UP);
    }
    for _ in rank..num_ranks {
        phases.backward(DOWN);
        phases.deferred_weight();
    }
    while phases.deferred_weight() {}
    phases
        .order
        .retain(|action| action.micro_batch < num_micro_batches);
    phases.order
}

/// The micro-batch that each kind of pass takes next.
#[derive(Default)]
struct Next {
    forward: usize,
    backward: usize,
}

#[derive(Default)]
struct Phases {
    order: Vec<Action>,
    next: [Next; 2],
    /// Deferred weight-gradient passes, oldest first.
    deferred: VecDeque<Action>,
}

impl Phases {
    fn forward(&mut self, chunk: usize) {
        self.order.push(forward(self.next[chunk].forward, chunk));
        self.next[chunk].forward += 1;
    }

    fn backward(&mut self, chunk: usize) {
        let micro_batch = self.next[chunk].backward;
        self.order.push(backward_input(micro_batch, chunk));
        self.deferred.push_back(backward_weight(micro_batch, chunk));
        self.next[chunk].backward += 1;
    }

    /// Adds the weight gradient of the backward that was just done in `chunk`.
    fn weight(&mut self, chunk: usize) {
        debug_assert!(
            self.order
                .last()
                .is_some_and(|done| { done.op == Op::BackwardInput && done.chunk == chunk })
        );
        self.order.extend(self.deferred.pop_back());
    }

    /// Adds the oldest deferred weight gradient. Returns whether there was one.
    fn deferred_weight(&mut self) -> bool {
        let weight = self.deferred.pop_front();
        self.order.extend(weight);
        weight.is_some()
    }
}
