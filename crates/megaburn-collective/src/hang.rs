//! What a rank knows when a collective does not end.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    call::Call,
    error::CollectiveError,
    fault::TransportError,
    group::Group,
    recorder::{FlightRecord, FlightState},
};

/// What a rank was doing when it learned that a collective did not end.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankReport {
    /// The rank.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// The sections of its work that it was in, the innermost last.
    pub sections: Vec<String>,
    /// How long it was in the innermost.
    pub section_seconds: f64,
    /// The phases that it was in, the innermost last.
    pub phases: Vec<String>,
    /// The ranks whose messages it waited for. On GPUs, where NCCL waits, there are none.
    pub waits_for: Vec<usize>,
    /// The members of its groups, by name.
    pub groups: BTreeMap<String, Vec<usize>>,
    /// Its last collectives, oldest first.
    pub calls: Vec<ReportedCall>,
    /// The last call that it received of each other rank, by group.
    pub heard: Vec<HeardCall>,
}

/// A collective of a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReportedCall {
    /// The group's name.
    pub group: String,
    /// The call.
    #[serde(flatten)]
    pub call: Call,
    /// Its progress.
    pub state: CallState,
    /// How long ago it was made.
    pub seconds: f64,
}

/// The progress of a collective of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CallState {
    /// It has not ended.
    Waiting,
    /// It has ended.
    Done,
    /// It ended with an error.
    Failed,
}

/// The first failure that a rank knows.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FirstFailure {
    /// Its text.
    pub why: String,
    /// Whether ranks hang or disagree.
    pub is_hang: bool,
}

/// A call of another rank, as its message said.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HeardCall {
    /// The rank that made it.
    pub from: usize,
    /// The group's name.
    pub group: String,
    /// The call.
    #[serde(flatten)]
    pub call: Call,
}

impl Group {
    /// What this rank is doing, and its last collectives over all groups. After a failure it is what
    /// the rank did when its first collective failed.
    pub fn report(&self) -> RankReport {
        let doing = self.0.activity.doing();
        let mut report = RankReport {
            rank: self.global_rank(),
            world_size: 1,
            sections: doing.sections.iter().map(ToString::to_string).collect(),
            section_seconds: doing.seconds,
            phases: doing.phases.iter().map(ToString::to_string).collect(),
            waits_for: doing.waits_for,
            ..RankReport::default()
        };
        if let Some(link) = &self.0.link {
            report.world_size = link.transport.world_size();
            report.groups = link.recorder.groups();
            report.calls = link.recorder.records().iter().map(reported).collect();
            let heard = link.recorder.heard().into_iter();
            report.heard = heard
                .map(|(from, group, call)| HeardCall { from, group, call })
                .collect();
        }
        report
    }

    /// The first failure of this rank, or that was reported to it, also while the rank's own thread
    /// is elsewhere and has not noticed it.
    pub fn first_failure(&self) -> Option<FirstFailure> {
        let link = self.0.link.as_ref()?;
        if let Some(failure) = link.failure.get() {
            return Some(FirstFailure {
                why: failure.to_string(),
                is_hang: failure.is_hang(),
            });
        }
        match link.transport.gone(link.transport.rank())? {
            TransportError::Aborted {
                by,
                reason,
                is_hang,
            } => Some(FirstFailure {
                why: format!("was ended by rank {by}, which failed first: {reason}"),
                is_hang,
            }),
            TransportError::Lost { peer, why } => Some(FirstFailure {
                why: format!("lost rank {peer}: {why}"),
                is_hang: false,
            }),
            TransportError::Timeout | TransportError::Stalled(_) => None,
        }
    }
}

fn reported(record: &FlightRecord) -> ReportedCall {
    ReportedCall {
        group: record.group.clone(),
        call: record.call.clone(),
        state: match record.state {
            FlightState::Started => CallState::Waiting,
            FlightState::Done(_) => CallState::Done,
            FlightState::Failed(_) => CallState::Failed,
        },
        seconds: record.age().as_secs_f64(),
    }
}

impl CollectiveError {
    /// Whether ranks hang or disagree, on this rank or on the one that failed first.
    pub fn is_hang(&self) -> bool {
        match self {
            Self::Mismatch { .. }
            | Self::Diverged { .. }
            | Self::Timeout { .. }
            | Self::Stalled { .. } => true,
            Self::Aborted { is_hang, .. } => *is_hang,
            Self::Unusable { first, .. } => first.is_hang(),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread, time::Duration};

    use burn::tensor::TensorData;

    use super::*;
    use crate::{call::ReduceOp, launch::run_threads, options::GroupOptions};

    /// Rank 1 works while rank 0 waits for it; a thread of rank 1 learns of the failure.
    #[test]
    fn ranks_report_where_they_are_when_one_of_them_does_not_come() {
        let options = GroupOptions {
            timeout: Duration::from_millis(300),
            ..GroupOptions::default()
        };
        let (done, end) = mpsc::channel();
        let end = std::sync::Mutex::new(end);
        let found = run_threads(2, options, |world| {
            world.all_reduce(TensorData::from([1.0f32]), ReduceOp::Sum)?;
            let _step = world.section("step");
            let _data = (world.rank() == 1).then(|| world.section("data"));
            if world.rank() == 0 {
                let error = world.barrier().unwrap_err();
                done.send(()).unwrap();
                assert!(error.is_hang());
            } else {
                end.lock().unwrap().recv().unwrap();
                while world.first_failure().is_none() {
                    thread::sleep(Duration::from_millis(1));
                }
            }
            let why = world.first_failure().unwrap();
            Ok::<_, CollectiveError>((why, world.report()))
        });
        let found: Vec<_> = found.into_iter().map(Result::unwrap).collect();
        let [first, second] = found.try_into().unwrap();
        assert!(first.0.is_hang && second.0.is_hang);
        let (first, second) = (first.1, second.1);
        assert_eq!(
            (first.sections, first.waits_for),
            (vec!["step".to_string()], vec![1])
        );
        assert_eq!(second.sections, ["step", "data"]);
        assert!(second.waits_for.is_empty() && second.section_seconds > 0.2);
        assert_eq!(first.groups["world"], [0, 1]);
        let states: Vec<_> = first
            .calls
            .iter()
            .map(|call| (call.call.seq, call.state))
            .collect();
        assert_eq!(states, [(0, CallState::Done), (1, CallState::Failed)]);
        assert_eq!(second.calls.len(), 1);
        let heard: Vec<_> = first
            .heard
            .iter()
            .map(|heard| (heard.from, heard.call.seq))
            .collect();
        assert_eq!(heard, [(1, 0)]);
    }
}
