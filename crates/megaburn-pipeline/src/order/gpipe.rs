use super::{backward, forward};
use crate::action::Action;

/// Every forward, then every backward; the chunks of the backwards are in reverse order.
pub(super) fn order(num_chunks: usize, num_micro_batches: usize) -> Vec<Action> {
    let all = 0..num_micro_batches;
    let forwards = (0..num_chunks).flat_map(|chunk| all.clone().map(move |i| forward(i, chunk)));
    let chunks = (0..num_chunks).rev();
    let backwards = chunks.flat_map(|chunk| all.clone().map(move |i| backward(i, chunk)));
    forwards.chain(backwards).collect()
}
