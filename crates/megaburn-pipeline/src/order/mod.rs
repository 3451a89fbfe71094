//! The order in which each rank computes, one file per schedule. This module has no sends; the
//! transfers follow from these orders alone ([`crate::transfers`]).

mod gpipe;
pub(crate) mod interleaved;
mod one_f_one_b;
mod zb_h1;
mod zb_v;

use crate::{
    action::{Action, Op},
    kind::ScheduleKind,
    stages::Stages,
};

/// The computing actions of each rank.
pub(crate) type Orders = Vec<Vec<Action>>;

/// The order of each rank for a schedule whose sizes are legal.
pub(crate) fn orders(
    kind: ScheduleKind,
    stages: Stages,
    num_micro_batches: usize,
    group_size: usize,
) -> Orders {
    let table = groups(num_micro_batches, stages.num_chunks, group_size);
    let order = |rank| match kind {
        ScheduleKind::GPipe => gpipe::order(stages.num_chunks, num_micro_batches),
        ScheduleKind::OneForwardOneBackward => {
            one_f_one_b::order(rank, stages.num_ranks, num_micro_batches)
        }
        ScheduleKind::Interleaved => interleaved::order(rank, stages, &table, group_size),
        ScheduleKind::ZbH1 => zb_h1::order(rank, stages.num_ranks, num_micro_batches),
        ScheduleKind::ZbV => zb_v::order(rank, stages.num_ranks, num_micro_batches),
        ScheduleKind::ForwardOnly => table.iter().map(|&(i, chunk)| forward(i, chunk)).collect(),
    };
    (0..stages.num_ranks).map(order).collect()
}

/// Micro-batches and chunks in the order of Megatron-LM's interleaving: a group of micro-batches
/// goes through every chunk, then the next group follows. The last group may be smaller.
fn groups(num_micro_batches: usize, num_chunks: usize, group_size: usize) -> Vec<(usize, usize)> {
    let mut table = Vec::with_capacity(num_micro_batches * num_chunks);
    for first in (0..num_micro_batches).step_by(group_size) {
        let group = first..num_micro_batches.min(first + group_size);
        for chunk in 0..num_chunks {
            table.extend(group.clone().map(|micro_batch| (micro_batch, chunk)));
        }
    }
    table
}

fn forward(micro_batch: usize, chunk: usize) -> Action {
    Action::new(Op::Forward, micro_batch, chunk)
}

fn backward(micro_batch: usize, chunk: usize) -> Action {
    Action::new(Op::Backward, micro_batch, chunk)
}

fn backward_input(micro_batch: usize, chunk: usize) -> Action {
    Action::new(Op::BackwardInput, micro_batch, chunk)
}

fn backward_weight(micro_batch: usize, chunk: usize) -> Action {
    Action::new(Op::BackwardWeight, micro_batch, chunk)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Megatron-LM's own example, in `get_schedule_table` of
    /// `megatron/core/pipeline_parallel/schedules.py`.
    #[test]
    fn the_table_by_groups_is_megatrons() {
        let table = groups(5, 2, 3);
        let (micro_batches, chunks): (Vec<_>, Vec<_>) = table.into_iter().unzip();
        assert_eq!(micro_batches, [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]);
        assert_eq!(chunks, [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]);
    }
}
