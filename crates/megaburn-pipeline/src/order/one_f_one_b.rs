use super::{backward, forward};
use crate::action::Action;

/// One warm-up forward per later rank, then alternating forwards and backwards, then the remaining
/// backwards. With 2 ranks and 3 micro-batches, where a backward takes two units of time (`=` is
/// its second one) and `.` is the bubble:
///
/// ```text
/// rank 0 | F0 F1 .  .  B0 =  F2 B1 =  .  B2 =
/// rank 1 | .  F0 B0 =  F1 B1 =  F2 B2 =  .  .
/// ```
pub(super) fn order(rank: usize, num_ranks: usize, num_micro_batches: usize) -> Vec<Action> {
    let warm_up = num_micro_batches.min(num_ranks - rank - 1);
    let steady = num_micro_batches - warm_up;
    // Warm-up: fill the pipeline.
    let mut order: Vec<Action> = (0..warm_up).map(|i| forward(i, 0)).collect();
    // Steady state: one forward, one backward.
    for i in 0..steady {
        order.extend([forward(warm_up + i, 0), backward(i, 0)]);
    }
    // Cool-down: drain the pipeline.
    order.extend((steady..num_micro_batches).map(|i| backward(i, 0)));
    order
}
