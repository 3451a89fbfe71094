//! The collectives of a rank while a profile is recorded: all of them, with the times of their
//! starts and ends. The flight recorder keeps only the last ones.

use std::{
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, ThreadId},
    time::Instant,
};

use crate::{call::Call, group::Group};

/// One collective of a rank while its collectives are traced.
#[derive(Clone, Debug)]
pub struct TracedCall {
    /// The group's name.
    pub group: String,
    /// The call.
    pub call: Call,
    /// When it was made.
    pub start: Instant,
    /// When it ended; `None` if it has not, or failed.
    pub end: Option<Instant>,
    /// Whether a GPU runs it, and the thread that made it did not wait for its end.
    pub is_on_gpu: bool,
    /// The thread that made it.
    pub thread: ThreadId,
}

/// The traced collectives of a rank over all its groups; off until a profile begins.
#[derive(Debug, Default)]
pub(crate) struct CallTrace {
    is_on: AtomicBool,
    calls: Mutex<Vec<(u64, TracedCall)>>,
}

impl CallTrace {
    pub(crate) fn begin(&self) {
        self.lock().clear();
        self.is_on.store(true, Ordering::Relaxed);
    }

    /// Adds the call with flight record `id`.
    pub(crate) fn start(&self, id: u64, group: &str, call: &Call, is_on_gpu: bool) {
        if !self.is_on.load(Ordering::Relaxed) {
            return;
        }
        let traced = TracedCall {
            group: group.to_string(),
            call: call.clone(),
            start: Instant::now(),
            end: None,
            is_on_gpu,
            thread: thread::current().id(),
        };
        self.lock().push((id, traced));
    }

    /// Marks the end of a call. Calls that began before the trace are ignored.
    pub(crate) fn finish(&self, id: u64) {
        if !self.is_on.load(Ordering::Relaxed) {
            return;
        }
        // Search from the back: the call that ends is nearly always one of the latest.
        if let Some((_, call)) = self.lock().iter_mut().rev().find(|(of, _)| *of == id) {
            call.end = Some(Instant::now());
        }
    }

    /// Whether every traced call has ended.
    fn is_complete(&self) -> bool {
        self.lock().iter().all(|(_, call)| call.end.is_some())
    }

    fn take(&self) -> Vec<TracedCall> {
        self.is_on.store(false, Ordering::Relaxed);
        let calls = std::mem::take(&mut *self.lock());
        calls.into_iter().map(|(_, call)| call).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(u64, TracedCall)>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Group {
    /// Begins to trace the collectives of this rank over all its groups.
    pub fn trace_calls(&self) {
        if let Some(link) = &self.0.link {
            link.recorder.trace.begin();
        }
    }

    /// Whether every traced collective has ended, also those that a GPU runs.
    pub fn has_ended_traced_calls(&self) -> bool {
        let link = self.0.link.as_ref();
        link.is_none_or(|link| link.recorder.trace.is_complete())
    }

    /// Ends the trace and returns its collectives, in the order of their starts.
    pub fn take_traced_calls(&self) -> Vec<TracedCall> {
        let link = self.0.link.as_ref();
        link.map_or_else(Vec::new, |link| link.recorder.trace.take())
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;

    use crate::{
        call::ReduceOp, error::CollectiveError, launch::run_threads, options::GroupOptions,
    };

    #[test]
    fn every_collective_between_begin_and_end_is_traced() {
        let found = run_threads(2, GroupOptions::default(), |world| {
            let sum = || world.all_reduce(TensorData::from([1.0f32, 2.0]), ReduceOp::Sum);
            sum()?;
            assert!(world.take_traced_calls().is_empty(), "it is off");
            let tp = world.subgroup("tp", &[0, 1])?;
            world.trace_calls();
            for _ in 0..100 {
                sum()?;
            }
            tp.barrier()?;
            assert!(world.has_ended_traced_calls());
            let calls = world.take_traced_calls();
            sum()?;
            assert!(world.take_traced_calls().is_empty());
            // All of them, while the flight recorder has only the last ones.
            assert_eq!(calls.len(), 101);
            assert!(calls[..100].iter().enumerate().all(|(at, call)| {
                call.group == "world" && call.call.seq == at as u64 + 1 && !call.is_on_gpu
            }));
            assert_eq!(calls[100].group, "tp");
            let spans = calls.iter().map(|call| (call.start, call.end.unwrap()));
            let spans: Vec<_> = spans.collect();
            assert!(spans.iter().all(|(start, end)| start <= end));
            assert!(spans.is_sorted_by(|before, after| before.1 <= after.0));
            Ok::<_, CollectiveError>(calls.len())
        });
        assert!(found.into_iter().all(|count| count.unwrap() == 101));
    }
}
