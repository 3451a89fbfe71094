use super::{backward_input, backward_weight, forward};
use crate::action::Action;

/// 1F1B whose backward defers the weight gradients: rank r lags by r micro-batches with them. So
/// every rank holds as many micro-batches as the first rank of 1F1B, and the deferred weight
/// gradients of the later ranks fill the time in which they would idle at the end.
pub(super) fn order(rank: usize, num_ranks: usize, num_micro_batches: usize) -> Vec<Action> {
    let warm_up = num_micro_batches.min(num_ranks - rank - 1);
    let steady = num_micro_batches - warm_up;
    // Warm-up: fill the pipeline.
    let mut order: Vec<Action> = (0..warm_up).map(|i| forward(i, 0)).collect();
    // Steady state, then the cool-down, which has no forwards.
    for i in 0..num_micro_batches {
        if i < steady {
            order.push(forward(warm_up + i, 0));
        }
        order.push(backward_input(i, 0));
        if i >= rank {
            order.push(backward_weight(i - rank, 0));
        }
    }
    // The weight gradients by which this rank lags.
    let deferred = num_micro_batches.saturating_sub(rank)..num_micro_batches;
    order.extend(deferred.map(|i| backward_weight(i, 0)));
    order
}
