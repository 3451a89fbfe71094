//! Reads samples before they are needed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Builder;
use std::time::Duration;

use crate::{
    error::DataError,
    samples::{Sample, Samples},
};

const SECOND: Duration = Duration::from_secs(1);

/// Samples that threads read ahead, for data sets whose reads take long: those of object stores, or
/// on slow disks. Memory holds the samples that were [requested](Self::request) last.
///
/// ```
/// use std::sync::Arc;
/// use megaburn_data::{ReadAhead, Sampler, Samples, TokenDataset};
///
/// let set = TokenDataset::from_tokens("count", &[0, 1, 2, 3, 4, 5, 6], 7)?;
/// let samples = Arc::new(Sampler::sequential(set, 2)?);
/// let ahead = ReadAhead::new(samples.clone(), 4)?;
/// ahead.request(1..3); // the samples of the next step
/// assert_eq!(ahead.sample(1)?, samples.sample(1)?);
/// assert_eq!(ahead.sample(0)?, samples.sample(0)?); // not requested: it is read at once
/// # Ok::<(), megaburn_data::DataError>(())
/// ```
pub struct ReadAhead {
    samples: Arc<dyn Samples>,
    shared: Arc<Shared>,
    num_workers: usize,
    /// Called every second while a sample is waited for.
    on_wait: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Signalled when a sample is wanted, or was read, or the end has come.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The samples that no worker reads yet, in the order of requests.
    wanted: VecDeque<u64>,
    /// What workers read, or have read.
    slots: BTreeMap<u64, Slot>,
    is_closed: bool,
}

enum Slot {
    Reading,
    Ready(Result<Sample, DataError>),
}

impl ReadAhead {
    /// Reads `samples` ahead with `num_workers` threads.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn new(samples: Arc<dyn Samples>, num_workers: usize) -> Result<Self, DataError> {
        let shared = Arc::new(Shared::default());
        let ahead = Self {
            samples,
            shared,
            num_workers,
            on_wait: OnceLock::new(),
        };
        for _ in 0..num_workers {
            let (samples, shared) = (ahead.samples.clone(), ahead.shared.clone());
            let worker = Builder::new().name("megaburn-data-worker".into());
            let worker = worker.spawn(move || shared.work(&*samples));
            worker.map_err(|source| DataError::Thread { source })?;
        }
        Ok(ahead)
    }

    /// Calls `on_wait` every second while a sample is waited for, such as to show that the process
    /// is alive. Only the first call has an effect.
    pub fn on_wait(&self, on_wait: impl Fn() + Send + Sync + 'static) {
        let _ = self.on_wait.set(Box::new(on_wait));
    }

    /// Asks for samples that will be needed, the first ones first. Those of earlier requests that are
    /// not among them are dropped.
    pub fn request(&self, indices: impl IntoIterator<Item = u64>) {
        let indices: Vec<u64> = indices.into_iter().collect();
        let all: BTreeSet<u64> = indices.iter().copied().collect();
        let mut state = self.shared.lock();
        state.wanted.retain(|index| all.contains(index));
        // A worker that reads a dropped sample finds no slot for it.
        state.slots.retain(|index, _| all.contains(index));
        let known: BTreeSet<u64> = state.wanted.iter().copied().collect();
        for index in indices {
            if !state.slots.contains_key(&index) && !known.contains(&index) {
                state.wanted.push_back(index);
            }
        }
        self.shared.changed.notify_all();
    }
}

impl Samples for ReadAhead {
    fn num_samples(&self) -> u64 {
        self.samples.num_samples()
    }

    fn order_hash(&self) -> u64 {
        self.samples.order_hash()
    }

    fn sample(&self, index: u64) -> Result<Sample, DataError> {
        let mut state = self.shared.lock();
        loop {
            match state.slots.remove(&index) {
                Some(Slot::Ready(sample)) => return sample,
                Some(Slot::Reading) => {
                    state.slots.insert(index, Slot::Reading);
                    let changed = self.shared.changed.wait_timeout(state, SECOND);
                    let (waited, timeout) = changed.unwrap_or_else(PoisonError::into_inner);
                    state = waited;
                    if let (true, Some(on_wait)) = (timeout.timed_out(), self.on_wait.get()) {
                        on_wait();
                    }
                }
                None => break,
            }
        }
        state.wanted.retain(|wanted| *wanted != index);
        drop(state);
        self.samples.sample(index)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a worker does until the end.
    fn work(&self, samples: &dyn Samples) {
        let mut state = self.lock();
        while !state.is_closed {
            let Some(index) = state.wanted.pop_front() else {
                let changed = self.changed.wait(state);
                state = changed.unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            state.slots.insert(index, Slot::Reading);
            drop(state);
            let sample = catch_unwind(AssertUnwindSafe(|| samples.sample(index)));
            state = self.lock();
            match (sample, state.slots.get_mut(&index)) {
                (Ok(sample), Some(slot)) => *slot = Slot::Ready(sample),
                // The one who needs the sample reads it, and panics too.
                (Err(_), _) => drop(state.slots.remove(&index)),
                // It was dropped in the meantime.
                (Ok(_), None) => {}
            }
            self.changed.notify_all();
        }
    }
}

impl Drop for ReadAhead {
    /// Ends the workers after the reads that have begun. It does not wait for them, because a
    /// server that does not answer would delay the end of the process.
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.changed.notify_all();
    }
}

impl fmt::Debug for ReadAhead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadAhead")
            .field("samples", &self.samples)
            .field("num_workers", &self.num_workers)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Sample `n` is the token `n`; each read waits until `together` reads run at the same time.
    #[derive(Debug)]
    struct Slow {
        together: Barrier,
        num_reads: AtomicUsize,
    }

    impl Slow {
        fn new(together: usize) -> Arc<Self> {
            Arc::new(Self {
                together: Barrier::new(together),
                num_reads: AtomicUsize::new(0),
            })
        }

        fn num_reads(&self) -> usize {
            self.num_reads.load(Ordering::SeqCst)
        }
    }

    impl Samples for Slow {
        fn num_samples(&self) -> u64 {
            100
        }

        fn sample(&self, index: u64) -> Result<Sample, DataError> {
            self.num_reads.fetch_add(1, Ordering::SeqCst);
            self.together.wait();
            if index == 13 {
                let what = "sample 13";
                return Err(DataError::Zero { what });
            }
            assert_ne!(index, 17, "this sample panics");
            Ok(Sample::Tokens(vec![index as u32]))
        }
    }

    fn read(ahead: &ReadAhead, indices: Range<u64>) {
        for index in indices {
            let sample = ahead.sample(index).unwrap();
            assert_eq!(sample, Sample::Tokens(vec![index as u32]));
        }
    }

    #[test]
    fn workers_read_at_the_same_time_and_each_sample_once() {
        // Each read needs three others at the same time, or none of them ends.
        let slow = Slow::new(4);
        let ahead = ReadAhead::new(slow.clone(), 4).unwrap();
        ahead.request(0..8);
        read(&ahead, 0..8);
        ahead.request(8..12);
        // Asked for again: nothing is read twice.
        ahead.request(8..12);
        read(&ahead, 8..12);
        assert_eq!(slow.num_reads(), 12);
    }

    #[test]
    fn what_was_not_requested_is_read_at_once_and_what_was_dropped_too() {
        let slow = Slow::new(1);
        let ahead = ReadAhead::new(slow.clone(), 2).unwrap();
        read(&ahead, 90..95);
        ahead.request(0..50);
        ahead.request(60..70);
        read(&ahead, 40..70);
        assert!(ahead.shared.lock().slots.is_empty());
        ahead.request(70..80);
        // Dropping it ends the workers.
    }

    #[test]
    fn an_error_is_that_of_its_sample() {
        let ahead = ReadAhead::new(Slow::new(1), 1).unwrap();
        ahead.request(12..15);
        read(&ahead, 12..13);
        let error = ahead.sample(13).unwrap_err().to_string();
        assert!(error.starts_with("sample 13 is 0"), "{error}");
        read(&ahead, 14..15);
    }

    #[test]
    fn a_panic_of_a_worker_is_that_of_the_reader() {
        let ahead = ReadAhead::new(Slow::new(1), 2).unwrap();
        ahead.request(16..20);
        let reader = catch_unwind(AssertUnwindSafe(|| read(&ahead, 16..20)));
        assert!(reader.is_err());
        read(&ahead, 18..30);
    }
}
