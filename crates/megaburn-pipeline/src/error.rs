use thiserror::Error;

use crate::{
    action::{Action, Message},
    kind::ScheduleKind,
};

/// Why a schedule cannot be built or is not sound.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the error message of each variant describes its fields"
)]
pub enum PipelineError {
    #[error("unknown schedule `{text}`: expected one of {}", ScheduleKind::ALL.map(ScheduleKind::name).join(", "))]
    UnknownKind { text: String },
    #[error("the schedule has 0 {what}: there must be at least 1")]
    Zero { what: &'static str },
    #[error(
        "the schedule has more than {most} forward passes: choose fewer ranks, chunks or \
            micro-batches"
    )]
    TooLarge { most: usize },
    #[error("{kind} with {num_chunks} chunks per rank: {rule}")]
    Chunks {
        kind: ScheduleKind,
        num_chunks: usize,
        rule: &'static str,
    },
    #[error("{kind} does not support the {placement} placement of stages")]
    Placement {
        kind: ScheduleKind,
        placement: &'static str,
    },
    #[error("{kind} has no micro-batch groups, but a group size of {group_size} is set: remove it")]
    NoGroups {
        kind: ScheduleKind,
        group_size: usize,
    },
    #[error(
        "micro-batch group size {group_size} must be at least the {num_ranks} ranks of the \
        pipeline, unless a group holds all micro-batches"
    )]
    GroupTooSmall { group_size: usize, num_ranks: usize },
    #[error("micro-batch group size {group_size} exceeds the {num_micro_batches} micro-batches")]
    GroupTooLarge {
        group_size: usize,
        num_micro_batches: usize,
    },
    #[error(
        "{num_micro_batches} micro-batches in groups of {group_size} leave {rest}, but a \
        pipeline of {num_ranks} ranks needs 0 or at least {num_ranks} in the last group: change \
        the number of micro-batches or the group size"
    )]
    Rest {
        num_micro_batches: usize,
        group_size: usize,
        rest: usize,
        num_ranks: usize,
    },
    #[error(
        "{num_layers} layers cannot fill {num_stages} pipeline stages{}: every stage needs one, \
        except the ends where the embedding or the loss counts as a layer{}",
        given(*first, *last),
        if first.or(*last).is_some() { ", and every layer needs a stage; choose other numbers" } else { "; choose more layers or fewer stages" }
    )]
    FewLayers {
        num_layers: usize,
        num_stages: usize,
        first: Option<usize>,
        last: Option<usize>,
    },
    #[error("pipeline layout `{text}`: {why}")]
    LayoutText { text: String, why: String },
    #[error(
        "a pipeline layout already defines every stage: remove the layer counts of the first and \
        last stage and the options that count the embedding and the loss as layers"
    )]
    TwoSplits,
    #[error("there are action lists for {found} of {expected} ranks")]
    Ranks { found: usize, expected: usize },
    #[error("rank {rank}, action {index}: the {action} does not belong to this schedule")]
    OutOfRange {
        rank: usize,
        index: usize,
        action: Action,
    },
    #[error("rank {rank} has the {action} {found} times instead of {expected}")]
    Count {
        rank: usize,
        action: Action,
        found: usize,
        expected: usize,
    },
    #[error("rank {rank}, action {index}: the {action} comes before the {missing}")]
    TooEarly {
        rank: usize,
        index: usize,
        action: Action,
        missing: Action,
    },
    #[error(
        "transfer {index} from rank {from} to rank {to}: {} is sent, but {} is received",
        shown(sent),
        shown(received)
    )]
    Unmatched {
        from: usize,
        to: usize,
        index: usize,
        sent: Option<Message>,
        received: Option<Message>,
    },
    #[error("deadlock: {}", waiting.iter().map(Waiting::to_string).collect::<Vec<_>>().join("; "))]
    Deadlock { waiting: Vec<Waiting> },
    #[error("costs are given for {found} ranks, but the schedule has {expected}")]
    Costs { found: usize, expected: usize },
}

/// A rank that cannot proceed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("rank {rank} waits for rank {for_rank} at action {index}, the {action}")]
pub struct Waiting {
    /// The waiting rank.
    pub rank: usize,
    /// The index of the action in its list.
    pub index: usize,
    /// The action that is blocked.
    pub action: Action,
    /// The rank that would have to act first.
    pub for_rank: usize,
}

/// The requested layers of the first and the last stage, as text.
fn given(first: Option<usize>, last: Option<usize>) -> String {
    match (first, last) {
        (None, None) => String::new(),
        (Some(first), None) => format!(" with {first} in the first"),
        (None, Some(last)) => format!(" with {last} in the last"),
        (Some(first), Some(last)) => format!(" with {first} in the first and {last} in the last"),
    }
}

fn shown(message: &Option<Message>) -> String {
    message.map_or("nothing".into(), |message| format!("the {message}"))
}
