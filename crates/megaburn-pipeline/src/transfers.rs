//! Inserts the sends and receives between the computing actions.
//!
//! All events of the pipeline are put into one global order: by the time at which they would happen
//! if transfers took no time, with each transfer at the end of the pass that produces its tensor.
//! Each rank's list is its part of that order.
//!
//! Whatever has to wait then waits for something earlier in the order, so the earliest pending
//! event can always run. There is no deadlock, even if a send blocks its rank until the receive.
//! That is why there is no action that sends and receives at once: two ranks with messages for each
//! other agree on which goes first, and with posted receives both are in flight together anyway.

use crate::{
    action::{Action, Message, Op},
    error::{PipelineError, Waiting},
    order::Orders,
    stages::Stages,
};

/// The sort key of an event: its time in half units (transfers at even ones, passes after them,
/// because they may need what arrives), then the message, so that both ends agree on the order.
type Key = (u64, Option<Message>);

/// Adds the transfers to each rank's order.
///
/// # Errors
/// The ranks would wait for each other in a cycle.
pub(crate) fn with_transfers(orders: Orders, stages: Stages) -> Result<Orders, PipelineError> {
    let mut ranks: Vec<Vec<(Key, Action)>> = vec![Vec::new(); orders.len()];
    for (rank, passes) in timeline(&orders, stages)?.into_iter().enumerate() {
        for (action, start) in passes {
            ranks[rank].push(((2 * start + 1, None), action));
            let Some((send, receive)) = transfer_after(action) else {
                continue;
            };
            let Some(message) = stages.message(rank, send) else {
                continue;
            };
            let key = (2 * (start + duration(action.op)), Some(message));
            let chunk = stages.chunk_of(message.to_stage);
            ranks[rank].push((key, send));
            let received = Action::new(receive, message.micro_batch, chunk);
            ranks[stages.rank_of(message.to_stage)].push((key, received));
        }
    }
    let in_order = |mut actions: Vec<(Key, Action)>| {
        actions.sort_by_key(|(key, _)| *key);
        actions.into_iter().map(|(_, action)| action).collect()
    };
    Ok(ranks.into_iter().map(in_order).collect())
}

/// The send that follows a pass, and the matching receive operation.
fn transfer_after(action: Action) -> Option<(Action, Op)> {
    let (send, receive) = match action.op {
        Op::Forward => (Op::SendActivation, Op::ReceiveActivation),
        Op::Backward | Op::BackwardInput => (Op::SendGradient, Op::ReceiveGradient),
        _ => return None,
    };
    Some((Action { op: send, ..action }, receive))
}

/// The three kinds of pass take equally long, and a joint backward counts as two.
fn duration(op: Op) -> u64 {
    if op == Op::Backward { 2 } else { 1 }
}

/// The start time of each pass.
pub(crate) fn timeline(
    orders: &Orders,
    stages: Stages,
) -> Result<Vec<Vec<(Action, u64)>>, PipelineError> {
    let most = orders
        .iter()
        .flatten()
        .map(|action| action.micro_batch + 1)
        .max()
        .unwrap_or(0);
    // End times of the forward and the backward, by stage and micro-batch.
    let mut ends = [
        vec![None; stages.num_stages() * most],
        vec![None; stages.num_stages() * most],
    ];
    let mut timed: Vec<Vec<(Action, u64)>> = vec![Vec::new(); orders.len()];
    let mut clocks = vec![0; orders.len()];
    loop {
        let mut waiting = Vec::new();
        let before: usize = timed.iter().map(Vec::len).sum();
        for (rank, order) in orders.iter().enumerate() {
            while let Some(&action) = order.get(timed[rank].len()) {
                let needs = match action.op {
                    Op::Forward => stages.before(rank, action.chunk).map(|stage| (0, stage)),
                    Op::BackwardWeight => None,
                    _ => stages.after(rank, action.chunk).map(|stage| (1, stage)),
                };
                let ready = needs.map_or(Some(0), |(way, stage)| {
                    ends[way][stage * most + action.micro_batch]
                });
                let Some(ready) = ready else {
                    let for_rank = needs.map_or(rank, |(_, stage)| stages.rank_of(stage));
                    let index = timed[rank].len();
                    waiting.push(Waiting {
                        rank,
                        index,
                        action,
                        for_rank,
                    });
                    break;
                };
                let start = clocks[rank].max(ready);
                clocks[rank] = start + duration(action.op);
                let own = stages.stage(rank, action.chunk) * most + action.micro_batch;
                match action.op {
                    Op::Forward => ends[0][own] = Some(clocks[rank]),
                    Op::BackwardWeight => {}
                    _ => ends[1][own] = Some(clocks[rank]),
                }
                timed[rank].push((action, start));
            }
        }
        if waiting.is_empty() {
            return Ok(timed);
        }
        if timed.iter().map(Vec::len).sum::<usize>() == before {
            return Err(PipelineError::Deadlock { waiting });
        }
    }
}
