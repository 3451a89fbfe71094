use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    fmt,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use crate::{call::Call, error::CollectiveError, fault::Channel, traced::CallTrace};

/// The progress of a recorded collective.
#[derive(Clone, Debug, PartialEq)]
pub enum FlightState {
    /// Called, not finished.
    Started,
    /// Finished after this many microseconds.
    Done(u128),
    /// Ended with this error.
    Failed(String),
}

/// One collective in the flight recorder.
#[derive(Clone, Debug)]
pub struct FlightRecord {
    /// The group's name.
    pub group: String,
    /// The call.
    pub call: Call,
    /// Its progress.
    pub state: FlightState,
    started: Instant,
    id: u64,
}

impl FlightRecord {
    /// How long ago the call was made.
    pub(crate) fn age(&self) -> Duration {
        self.started.elapsed()
    }
}

impl fmt::Display for FlightRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: ", self.group, self.call)?;
        match &self.state {
            FlightState::Started => write!(f, "waiting for {:.1?}", self.started.elapsed()),
            FlightState::Done(micros) => write!(f, "done in {micros} us"),
            FlightState::Failed(_) => f.write_str("FAILED"),
        }
    }
}

/// Keeps the last collectives of a rank over all its groups, for the report of a failure.
#[derive(Debug, Default)]
pub(crate) struct FlightRecorder {
    records: Mutex<(u64, VecDeque<FlightRecord>)>,
    /// The same calls while a profile is recorded.
    pub(crate) trace: CallTrace,
    /// The names and members of the rank's groups.
    groups: Mutex<HashMap<Channel, (String, Vec<usize>)>>,
    /// The last calls that other ranks have sent, by group and rank.
    heard: Mutex<HashMap<(Channel, usize), Call>>,
}

impl FlightRecorder {
    /// Records to keep, unless the oldest is still in flight.
    const KEPT: usize = 64;
    /// The most records ever kept.
    const MOST: usize = 1024;

    pub(crate) fn start(&self, group: &str, call: &Call) -> u64 {
        self.record(group, call, false)
    }

    /// As [`start`](Self::start), for a call that a GPU runs.
    #[cfg(feature = "cuda")]
    pub(crate) fn start_on_gpu(&self, group: &str, call: &Call) -> u64 {
        self.record(group, call, true)
    }

    fn record(&self, group: &str, call: &Call, is_on_gpu: bool) -> u64 {
        let mut records = self.lock();
        let (next, queue) = &mut *records;
        let id = *next;
        *next += 1;
        // A GPU's calls end long after they are made. Keep the oldest record while its call is in
        // flight: it is the one that a report needs.
        while queue.len() >= Self::KEPT
            && (queue.len() >= Self::MOST || queue[0].state != FlightState::Started)
        {
            queue.pop_front();
        }
        queue.push_back(FlightRecord {
            group: group.to_string(),
            call: call.clone(),
            state: FlightState::Started,
            started: Instant::now(),
            id,
        });
        self.trace.start(id, group, call, is_on_gpu);
        id
    }

    pub(crate) fn finish(&self, id: u64, failure: Option<String>) {
        if failure.is_none() {
            self.trace.finish(id);
        }
        let mut records = self.lock();
        // Search from the back: the call that ends is nearly always the latest.
        if let Some(record) = records.1.iter_mut().rev().find(|record| record.id == id) {
            record.state = match failure {
                Some(error) => FlightState::Failed(error),
                None => FlightState::Done(record.started.elapsed().as_micros()),
            };
        }
    }

    /// The call of a record, unless the record was evicted.
    #[cfg(any(feature = "cuda", test))]
    pub(crate) fn call(&self, id: u64) -> Option<Call> {
        self.lock()
            .1
            .iter()
            .find(|record| record.id == id)
            .map(|record| record.call.clone())
    }

    /// The records as text for the report of `error`. Where a peer is gone, the calls before say
    /// little, so only a few are in it.
    pub(crate) fn dump_after(&self, rank: usize, error: &CollectiveError) -> String {
        match error {
            CollectiveError::PeerLost { .. } => self.dump(rank, Self::KEPT / 8),
            _ => self.dump(rank, Self::KEPT),
        }
    }

    /// The records as text, one line each.
    pub(crate) fn dump_all(&self, rank: usize) -> String {
        self.dump(rank, Self::KEPT)
    }

    /// The records as text, one line each; of more than `most` only the first and the last ones.
    fn dump(&self, rank: usize, most: usize) -> String {
        let lines: Vec<_> = self
            .records()
            .into_iter()
            .map(|record| format!("  {record}\n"))
            .collect();
        let left_out = lines.len().saturating_sub(most);
        let (first, rest) = lines.split_at(lines.len().min(most / 2));
        let first = first.concat();
        let last = rest[left_out..].concat();
        let between = match left_out {
            0 => String::new(),
            some => format!("  .. {some} more ..\n"),
        };
        format!("last collectives of rank {rank}:\n{first}{between}{last}")
    }

    /// Keeps the name and the members of a group of the rank.
    pub(crate) fn note_group(&self, channel: Channel, name: &str, members: &[usize]) {
        lock(&self.groups).insert(channel, (name.to_string(), members.to_vec()));
    }

    /// Keeps a call that rank `from` has sent in a group.
    pub(crate) fn hear(&self, channel: Channel, from: usize, call: &Call) {
        let mut heard = lock(&self.heard);
        match heard.get_mut(&(channel, from)) {
            Some(last) => last.clone_from(call),
            None => _ = heard.insert((channel, from), call.clone()),
        }
    }

    /// The members of the rank's groups, by name.
    pub(crate) fn groups(&self) -> BTreeMap<String, Vec<usize>> {
        lock(&self.groups).values().cloned().collect()
    }

    /// The last call that each other rank has sent in each group: the rank, the group's name, and
    /// the call.
    pub(crate) fn heard(&self) -> Vec<(usize, String, Call)> {
        let groups = lock(&self.groups);
        let heard = lock(&self.heard);
        let heard = heard.iter().map(|((channel, from), call)| {
            let name = groups.get(channel).map(|(name, _)| name.clone());
            (*from, name.unwrap_or_default(), call.clone())
        });
        let mut heard: Vec<_> = heard.collect();
        heard.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
        heard
    }

    /// The records, oldest first.
    pub(crate) fn records(&self) -> Vec<FlightRecord> {
        self.lock().1.iter().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, (u64, VecDeque<FlightRecord>)> {
        lock(&self.records)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;

    use super::*;
    use crate::call::Collective;

    #[test]
    fn a_call_that_waits_is_kept_while_others_come_and_go() {
        let recorder = FlightRecorder::default();
        let start = |seq| {
            let call = Call {
                op: Collective::AllGather,
                seq,
                dtype: DType::F32,
                shape: vec![3],
            };
            recorder.start("tp", &call)
        };
        start(0);
        (1..300).for_each(|seq| recorder.finish(start(seq), None));
        assert_eq!(recorder.records()[0].call.seq, 0);
        assert_eq!(recorder.records().len(), 300);
        let dump = recorder.dump_all(2);
        assert!(dump.contains("rank 2") && dump.contains("#0 of") && dump.contains("#299 of"));
        assert!(
            dump.contains(".. 236 more ..") && dump.lines().count() == 66,
            "{dump}"
        );
        recorder.finish(0, None);
        start(300);
        assert_eq!(recorder.records().len(), 64);
        assert!(!recorder.dump_all(2).contains("more"));
        let call = Box::new(recorder.records()[0].call.clone());
        let lost = CollectiveError::PeerLost {
            rank: 2,
            group: "tp".into(),
            call,
            peer: 1,
            why: "it was killed".into(),
        };
        let dump = recorder.dump_after(2, &lost);
        assert!(
            dump.contains(".. 56 more ..") && dump.contains("#300 of"),
            "{dump}"
        );
    }
}
