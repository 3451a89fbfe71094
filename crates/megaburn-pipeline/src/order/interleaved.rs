use super::{backward, forward};
use crate::{Action, PipelineError, Stages};

/// The size of the groups: what is asked for, else the smallest that every rule allows.
///
/// # Errors
/// Unless it is alone, a group must keep all ranks busy until its first micro-batch comes round
/// again, so it has at least `num_ranks`, and so has what is left for the last one. That is
/// Megatron-LM's rule. Outside of it some sizes deadlock and the others wait longer.
pub(crate) fn group_size(
    asked: Option<usize>,
    num_ranks: usize,
    num_micro_batches: usize,
) -> Result<usize, PipelineError> {
    let is_legal = |group_size| {
        let rest = num_micro_batches % group_size;
        group_size == num_micro_batches
            || (num_ranks..num_micro_batches).contains(&group_size)
                && (rest == 0 || rest >= num_ranks)
    };
    let Some(group_size) = asked else {
        // One group of all is legal.
        return Ok((num_ranks..num_micro_batches)
            .find(|n| is_legal(*n))
            .unwrap_or(num_micro_batches));
    };
    match num_micro_batches % group_size {
        _ if is_legal(group_size) => Ok(group_size),
        _ if group_size > num_micro_batches => Err(PipelineError::GroupTooLarge {
            group_size,
            num_micro_batches,
        }),
        _ if group_size < num_ranks => Err(PipelineError::GroupTooSmall {
            group_size,
            num_ranks,
        }),
        rest => Err(PipelineError::Rest {
            num_micro_batches,
            group_size,
            rest,
            num_ranks,
        }),
    }
}

/// How many forwards come before the first that a backward follows: every chunk but the last for
/// the first group, and two for each rank behind, one for the way there and one for the way back.
pub(crate) fn warm_up(rank: usize, stages: Stages, group_size: usize) -> usize {
    (stages.num_ranks - rank - 1) * 2 + (stages.num_chunks - 1) * group_size
}

/// The forwards in the order of the table, the backwards in the same with the chunks from last to
/// first; after the warm-up one of each in turn.
pub(super) fn order(
    rank: usize,
    stages: Stages,
    table: &[(usize, usize)],
    group_size: usize,
) -> Vec<Action> {
    let num_chunks = stages.num_chunks;
    let warm_up = table.len().min(warm_up(rank, stages, group_size));
    let mut forwards = table
        .iter()
        .map(|&(micro_batch, chunk)| forward(micro_batch, chunk));
    let mut order: Vec<Action> = forwards.by_ref().take(warm_up).collect();
    for &(micro_batch, chunk) in table {
        order.extend(forwards.next());
        order.push(backward(micro_batch, num_chunks - 1 - chunk));
    }
    order
}
