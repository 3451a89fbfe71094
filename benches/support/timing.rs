//! Repeated wall-clock times and what is said about them.

use std::time::{Duration, Instant};

/// The times of one thing, done again and again.
#[derive(Clone, Debug, Default)]
pub struct Times(Vec<Duration>);

impl Times {
    /// Runs `work` and notes how long it took.
    pub fn measure(&mut self, work: impl FnOnce()) {
        let start = Instant::now();
        work();
        self.push(start.elapsed());
    }

    /// Notes one time.
    pub fn push(&mut self, time: Duration) {
        self.0.push(time);
    }

    /// Notes all times of another.
    pub fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// How many times there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The middle time in seconds; of an even number the upper one of the two. NaN without any.
    pub fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort();
        sorted
            .get(sorted.len() / 2)
            .map_or(f64::NAN, Duration::as_secs_f64)
    }

    /// The shortest time in seconds: what the machine can do when nothing else runs on it. NaN
    /// without any.
    pub fn min(&self) -> f64 {
        self.0.iter().min().map_or(f64::NAN, Duration::as_secs_f64)
    }
}

/// Seconds as milliseconds with two digits.
pub fn millis(seconds: f64) -> String {
    format!("{:.2}", seconds * 1e3)
}

/// A rayon pool of `threads` for Burn's CPU backend, its threads with stacks for deep graphs.
///
/// # Panics
/// If the system has no room for the threads.
pub fn pool(threads: usize) -> rayon::ThreadPool {
    let builder = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .stack_size(32 << 20);
    builder
        .build()
        .expect("the system has room for a few threads")
}
