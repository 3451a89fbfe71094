//! Static checks of the lists, without running them.

use std::collections::{BTreeMap, HashSet};

use super::Proof;
use crate::{
    action::{Action, Message, Op},
    error::PipelineError,
    schedule::Schedule,
};

/// Checks everything except whether the lists run to their ends.
pub(super) fn check(schedule: &Schedule) -> Result<Proof, PipelineError> {
    let found = schedule.ranks.len();
    let expected = schedule.stages.num_ranks;
    if found != expected {
        return Err(PipelineError::Ranks { found, expected });
    }
    let mut peak_activations = Vec::with_capacity(expected);
    for rank in 0..expected {
        counts(schedule, rank)?;
        in_order(schedule, rank)?;
        peak_activations.push(peak(&schedule.ranks[rank], schedule.kind.has_backward()));
    }
    matched(schedule)?;
    Ok(Proof { peak_activations })
}

/// Checks that each action is there as often as the stages require: once or not at all.
fn counts(schedule: &Schedule, rank: usize) -> Result<(), PipelineError> {
    let chunks = schedule.stages.num_chunks;
    let micro_batches = schedule.num_micro_batches;
    let mut counts = vec![0; Op::ALL.len() * chunks * micro_batches];
    let place =
        |Action {
             op,
             micro_batch,
             chunk,
         }: Action| { (op as usize * chunks + chunk) * micro_batches + micro_batch };
    for (index, &action) in schedule.ranks[rank].iter().enumerate() {
        if action.chunk >= chunks || action.micro_batch >= micro_batches {
            return Err(PipelineError::OutOfRange {
                rank,
                index,
                action,
            });
        }
        counts[place(action)] += 1;
    }
    for op in Op::ALL {
        for chunk in 0..chunks {
            let expected = usize::from(is_wanted(schedule, rank, op, chunk));
            for micro_batch in 0..micro_batches {
                let action = Action {
                    op,
                    micro_batch,
                    chunk,
                };
                let found = counts[place(action)];
                if found != expected {
                    return Err(PipelineError::Count {
                        rank,
                        action,
                        found,
                        expected,
                    });
                }
            }
        }
    }
    Ok(())
}

fn is_wanted(schedule: &Schedule, rank: usize, op: Op, chunk: usize) -> bool {
    let kind = schedule.kind;
    let has_peer = || {
        schedule
            .stages
            .peer(rank, Action::new(op, 0, chunk))
            .is_some()
    };
    match op {
        Op::Forward => true,
        Op::Backward => kind.has_backward() && !kind.splits_backward(),
        Op::BackwardInput | Op::BackwardWeight => kind.splits_backward(),
        Op::ReceiveActivation | Op::SendActivation => has_peer(),
        Op::ReceiveGradient | Op::SendGradient => kind.has_backward() && has_peer(),
    }
}

/// Checks that each action comes after the actions of the same rank that it needs.
fn in_order(schedule: &Schedule, rank: usize) -> Result<(), PipelineError> {
    let mut done = HashSet::new();
    for (index, &action) in schedule.ranks[rank].iter().enumerate() {
        for missing in needs(schedule, rank, action).into_iter().flatten() {
            if !done.contains(&missing) {
                return Err(PipelineError::TooEarly {
                    rank,
                    index,
                    action,
                    missing,
                });
            }
        }
        done.insert(action);
    }
    Ok(())
}

/// The actions that the same rank must have done before.
fn needs(schedule: &Schedule, rank: usize, action: Action) -> [Option<Action>; 2] {
    let stages = schedule.stages;
    let backward = if schedule.kind.splits_backward() {
        Op::BackwardInput
    } else {
        Op::Backward
    };
    let same = |op| Some(Action { op, ..action });
    // The input from the neighbouring stage: received, or computed by this rank in another chunk.
    let from = |stage: Option<usize>, receive, made| {
        stage.and_then(|stage| {
            if stages.rank_of(stage) == rank {
                Some(Action {
                    op: made,
                    chunk: stages.chunk_of(stage),
                    ..action
                })
            } else {
                same(receive)
            }
        })
    };
    let before = stages.before(rank, action.chunk);
    let after = stages.after(rank, action.chunk);
    match action.op {
        Op::ReceiveActivation | Op::ReceiveGradient => [None, None],
        Op::Forward => [from(before, Op::ReceiveActivation, Op::Forward), None],
        Op::SendActivation => [same(Op::Forward), None],
        Op::Backward | Op::BackwardInput => [
            same(Op::Forward),
            from(after, Op::ReceiveGradient, backward),
        ],
        Op::BackwardWeight => [same(Op::BackwardInput), None],
        Op::SendGradient => [same(backward), None],
    }
}

/// Checks that each rank receives what the other sends, in the same order.
fn matched(schedule: &Schedule) -> Result<(), PipelineError> {
    let mut sent: BTreeMap<(usize, usize), Vec<Message>> = BTreeMap::new();
    let mut received = sent.clone();
    for (rank, actions) in schedule.ranks.iter().enumerate() {
        for &action in actions {
            let Some(peer) = schedule.stages.peer(rank, action) else {
                continue;
            };
            let message = schedule.stages.message(rank, action);
            let (pair, side) = match action.op {
                Op::SendActivation | Op::SendGradient => ((rank, peer), &mut sent),
                _ => ((peer, rank), &mut received),
            };
            side.entry(pair).or_default().extend(message);
        }
    }
    // `counts` has checked that every message has both ends, so no pair of ranks is on one side
    // only.
    for (&(from, to), sent) in &sent {
        let received = received
            .get(&(from, to))
            .map_or(&[][..], |messages| messages);
        for index in 0..sent.len().max(received.len()) {
            let sent = sent.get(index).copied();
            let received = received.get(index).copied();
            if sent != received {
                return Err(PipelineError::Unmatched {
                    from,
                    to,
                    index,
                    sent,
                    received,
                });
            }
        }
    }
    Ok(())
}

fn peak(actions: &[Action], has_backward: bool) -> usize {
    let mut live = 0_usize;
    let mut peak = 0;
    for action in actions {
        match action.op {
            Op::Forward if has_backward => live += 1,
            // Each comes once per forward, and after it.
            Op::Backward | Op::BackwardWeight => live -= 1,
            _ => {}
        }
        peak = peak.max(live);
    }
    peak
}
