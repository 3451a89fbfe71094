use std::{
    collections::VecDeque,
    fmt,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use crate::message::Call;

/// How far a recorded collective came.
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
    /// What was called.
    pub call: Call,
    /// How far it came.
    pub state: FlightState,
    started: Instant,
    id: u64,
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

/// Keeps the last collectives of a rank over all its groups, for the day one fails.
#[derive(Debug, Default)]
pub(crate) struct FlightRecorder {
    records: Mutex<(u64, VecDeque<FlightRecord>)>,
}

impl FlightRecorder {
    const KEPT: usize = 64;

    pub(crate) fn start(&self, group: &str, call: &Call) -> u64 {
        let mut records = self.lock();
        let (next, queue) = &mut *records;
        let id = *next;
        *next += 1;
        if queue.len() == Self::KEPT {
            queue.pop_front();
        }
        queue.push_back(FlightRecord {
            group: group.to_string(),
            call: call.clone(),
            state: FlightState::Started,
            started: Instant::now(),
            id,
        });
        id
    }

    pub(crate) fn finish(&self, id: u64, failure: Option<String>) {
        let mut records = self.lock();
        // Searched from the back: the call that ends is nearly always the latest.
        if let Some(record) = records.1.iter_mut().rev().find(|record| record.id == id) {
            record.state = match failure {
                Some(error) => FlightState::Failed(error),
                None => FlightState::Done(record.started.elapsed().as_micros()),
            };
        }
    }

    /// The call of a record, unless it was pushed out.
    #[cfg(any(feature = "cuda", test))]
    pub(crate) fn call(&self, id: u64) -> Option<Call> {
        self.lock().1.iter().find(|record| record.id == id).map(|record| record.call.clone())
    }

    /// The records, oldest first.
    pub(crate) fn records(&self) -> Vec<FlightRecord> {
        self.lock().1.iter().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, (u64, VecDeque<FlightRecord>)> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
