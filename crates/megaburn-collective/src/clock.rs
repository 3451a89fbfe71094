//! The time during which this process was running.
//!
//! A process can be suspended: by Ctrl-Z, `docker pause`, a scheduler, a frozen virtual machine.
//! The system's clock continues, so a distant deadline has passed when the process resumes,
//! although no rank had a chance to meet it. Therefore all limits of this crate are measured with a
//! clock that skips such gaps. A thread reads it every [`TICK`]; a pause of more than [`SUSPENDED`]
//! between two readings is a suspension and counts as one tick.

use std::{
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// The clock is read at least this often.
const TICK: Duration = Duration::from_millis(50);
/// A gap above this is a suspension; a busy machine delays a thread by less.
const SUSPENDED: Duration = Duration::from_millis(500);

/// The current time, without the time during which this process was suspended.
pub(crate) fn now() -> Instant {
    let Some(clock) = clock() else {
        return Instant::now();
    };
    let mut clock = lock(clock);
    clock.read(Instant::now())
}

/// The last reading and the time skipped so far.
#[derive(Debug)]
struct Clock {
    last: Instant,
    left_out: Duration,
}

impl Clock {
    fn starting(at: Instant) -> Self {
        Self {
            last: at,
            left_out: Duration::ZERO,
        }
    }

    fn read(&mut self, system: Instant) -> Instant {
        let gap = system.saturating_duration_since(self.last);
        if gap > SUSPENDED {
            self.left_out += gap - TICK;
        }
        self.last = self.last.max(system);
        self.last.checked_sub(self.left_out).unwrap_or(self.last)
    }
}

/// The process's clock; `None` if its thread cannot be started. A suspension then cannot be
/// distinguished from an idle program.
fn clock() -> Option<&'static Mutex<Clock>> {
    static CLOCK: OnceLock<Mutex<Clock>> = OnceLock::new();
    static STARTED: OnceLock<bool> = OnceLock::new();
    let clock = CLOCK.get_or_init(|| Mutex::new(Clock::starting(Instant::now())));
    let started = STARTED.get_or_init(|| {
        let read = move || {
            loop {
                thread::sleep(TICK);
                lock(clock).read(Instant::now());
            }
        };
        thread::Builder::new()
            .name("clock".into())
            .spawn(read)
            .is_ok()
    });
    started.then_some(clock)
}

/// Ignores poisoning: a panic leaves the clock consistent.
fn lock(clock: &Mutex<Clock>) -> MutexGuard<'_, Clock> {
    clock.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_suspension_is_left_out_and_a_slow_reading_is_not() {
        let begin = Instant::now();
        let after = |millis| begin + Duration::from_millis(millis);
        let mut clock = Clock::starting(begin);
        assert_eq!(clock.read(after(50)), after(50));
        assert_eq!(clock.read(after(450)), after(450));
        // An hour in which nothing of this process ran.
        assert_eq!(clock.read(after(3_600_450)), after(500));
        assert_eq!(clock.read(after(3_600_550)), after(600));
        // Readings of two threads may arrive out of order.
        assert_eq!(clock.read(after(3_600_540)), after(600));
    }

    #[test]
    fn a_running_process_has_the_systems_time() {
        let begin = now();
        let system = Instant::now();
        thread::sleep(4 * TICK);
        let passed = now() - begin;
        let expected = system.elapsed();
        assert!(
            passed + SUSPENDED > expected && passed < expected + SUSPENDED,
            "{passed:?}"
        );
    }
}
