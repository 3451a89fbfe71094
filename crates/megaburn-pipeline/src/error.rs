use thiserror::Error;

use crate::{Action, Message, ScheduleKind};

/// Why a schedule cannot be built or is not sound.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the message of each variant says what its fields are"
)]
pub enum PipelineError {
    #[error("`{text}` is no schedule: there are {}", ScheduleKind::ALL.map(ScheduleKind::name).join(", "))]
    UnknownKind { text: String },
    #[error("a schedule of 0 {what}: there must be at least 1")]
    Zero { what: &'static str },
    #[error("a schedule of more than {most} forwards: choose fewer ranks, chunks or micro-batches")]
    TooLarge { most: usize },
    #[error("{kind} with {num_chunks} chunks a rank: {rule}")]
    Chunks {
        kind: ScheduleKind,
        num_chunks: usize,
        rule: &'static str,
    },
    #[error("{kind} cannot have its stages placed as a {placement}")]
    Placement {
        kind: ScheduleKind,
        placement: &'static str,
    },
    #[error(
        "{kind} has no micro-batch groups, and a group size of {group_size} is asked for: leave it out"
    )]
    NoGroups {
        kind: ScheduleKind,
        group_size: usize,
    },
    #[error(
        "a group of {group_size} micro-batches in a pipeline of {num_ranks} ranks: it must be at least {num_ranks}, unless it holds all micro-batches"
    )]
    GroupTooSmall { group_size: usize, num_ranks: usize },
    #[error(
        "a group of {group_size} of {num_micro_batches} micro-batches: it can be {num_micro_batches} at most"
    )]
    GroupTooLarge {
        group_size: usize,
        num_micro_batches: usize,
    },
    #[error(
        "{num_micro_batches} micro-batches in groups of {group_size} leave {rest}, and a pipeline of {num_ranks} ranks needs 0 or at least {num_ranks} in the last group: change the number of micro-batches or the group size"
    )]
    Rest {
        num_micro_batches: usize,
        group_size: usize,
        rest: usize,
        num_ranks: usize,
    },
    #[error(
        "{num_layers} layers cannot fill {num_stages} pipeline stages{}: every stage needs one, but for the ends where the embedding or the loss is counted{}",
        given(*first, *last),
        if first.or(*last).is_some() { ", and every layer a stage; choose other numbers" } else { "; choose more layers or fewer stages" }
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
        "a pipeline layout says what every stage has: leave out the counts of the first and the last stage, of the embedding and of the loss"
    )]
    TwoSplits,
    #[error("there are lists for {found} ranks of {expected}")]
    Ranks { found: usize, expected: usize },
    #[error("rank {rank}, action {index}: there is no {action}")]
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
        "transfer {index} from rank {from} to rank {to}: {} is sent, {} is received",
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
    #[error("costs of {found} ranks for a schedule of {expected}")]
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
