use super::{backward, forward};
use crate::action::Action;

/// One warm-up forward per later rank, then alternating forwards and backwards, then the remaining
/// backwards.
pub(super) fn order(rank: usize, num_ranks: usize, num_micro_batches: usize) -> Vec<Action> {
    let warm_up = num_micro_batches.min(num_ranks - rank - 1);
    let mut order: Vec<Action> = (0..warm_up).map(|i| forward(i, 0)).collect();
    for i in 0..num_micro_batches {
        order.extend((i + warm_up < num_micro_batches).then(|| forward(i + warm_up, 0)));
        order.push(backward(i, 0));
    }
    order
}
