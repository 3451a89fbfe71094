use super::{backward, forward};
use crate::{action::Action, error::PipelineError, stages::Stages};

/// The size of the groups: the requested size, else the smallest legal one.
///
/// # Errors
/// Unless it is the only one, a group must keep all ranks busy until its first micro-batch returns
/// to the first rank. So each group, including the last one, must have at least `num_ranks`
/// micro-batches. This is Megatron-LM's rule; some of the sizes it excludes deadlock and the others
/// wait longer.
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
        // A single group of all micro-batches is always legal.
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

/// The number of forwards before the first one that is followed by a backward: all chunks but the
/// last for the first group, plus two for each later rank, one down and one back.
pub(crate) fn warm_up(rank: usize, stages: Stages, group_size: usize) -> usize {
    (stages.num_ranks - rank - 1) * 2 + (stages.num_chunks - 1) * group_size
}

/// Forwards in the order of the table, backwards in the same order with the chunks reversed. After
/// the warm-up they alternate.
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
