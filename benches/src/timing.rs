//! Repeated wall-clock times and their statistics.

use std::time::{Duration, Instant};

/// The times of repetitions of one piece of work.
#[derive(Clone, Debug, Default)]
pub struct Times(Vec<Duration>);

impl Times {
    /// Runs `work` and records how long it took.
    pub fn measure(&mut self, work: impl FnOnce()) {
        let start = Instant::now();
        work();
        self.push(start.elapsed());
    }

    /// Records one time.
    pub fn push(&mut self, time: Duration) {
        self.0.push(time);
    }

    /// Records all times of `other`.
    pub fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// The number of recorded times.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The median time in seconds (the upper of the two middle ones if the count is even). NaN if
    /// there are no times.
    pub fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort();
        sorted
            .get(sorted.len() / 2)
            .map_or(f64::NAN, Duration::as_secs_f64)
    }

    /// The shortest time in seconds: what the machine can do when nothing else runs on it. NaN if
    /// there are no times.
    pub fn min(&self) -> f64 {
        self.0.iter().min().map_or(f64::NAN, Duration::as_secs_f64)
    }
}

/// Formats seconds as milliseconds with two digits.
pub fn millis(seconds: f64) -> String {
    format!("{:.2}", seconds * 1e3)
}

/// Creates a rayon pool of `threads` threads for Burn's CPU backend, with stacks large enough for
/// deep graphs.
///
/// # Panics
/// The system cannot create the threads.
pub fn pool(threads: usize) -> rayon::ThreadPool {
    let builder = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .stack_size(32 << 20);
    builder.build().expect("the system can start a few threads")
}
