//! What a rank in a long phase reports to the ranks that wait for it.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

/// Long work of one rank during which others wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Phase {
    /// Loading data, building the model, and on GPUs the first step, which compiles kernels.
    Start,
    /// Writing a checkpoint.
    Save,
    /// Reading or verifying a checkpoint or a model.
    Load,
    /// Reading the samples of a micro-batch.
    Data,
    /// Evaluating.
    Evaluate,
}

impl Phase {
    /// The configuration key of the phase's limit.
    pub fn limit_key(self) -> &'static str {
        match self {
            Self::Start => "train.start_timeout_seconds",
            Self::Save => "train.save_timeout_seconds",
            Self::Load => "train.load_timeout_seconds",
            Self::Data => "train.data_timeout_seconds",
            Self::Evaluate => "train.eval_timeout_seconds",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Start => "start",
            Self::Save => "save",
            Self::Load => "load",
            Self::Data => "data",
            Self::Evaluate => "evaluate",
        })
    }
}

/// Whether a rank is in a phase, which decides the limit that applies to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Place {
    /// It works in the phase, whose limit applies.
    Inside,
    /// It waits for other ranks within the phase: the limit of collectives applies.
    Waiting,
    /// It has left the phase and is in none: the limit of collectives applies.
    Left,
}

/// A rank's answer to a peer whose wait timed out: what it is doing and how long it has made no
/// progress.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Busy {
    /// The rank that works. A rank that waits for it forwards its answer to the ranks waiting for
    /// itself.
    pub(crate) rank: usize,
    pub(crate) phase: Phase,
    pub(crate) place: Place,
    /// Bytes done, and the total number of bytes where that is known.
    pub(crate) done: u64,
    pub(crate) total: u64,
    /// The time since its last progress, at the time of the answer.
    pub(crate) idle: Duration,
    /// How long it may make no progress.
    pub(crate) limit: Duration,
}

impl Busy {
    /// The time that remains until the limit without progress is reached.
    pub(crate) fn left(&self) -> Duration {
        self.limit.saturating_sub(self.idle)
    }

    /// The configuration key of that limit.
    pub(crate) fn limit_key(&self) -> &'static str {
        match self.place {
            Place::Inside => self.phase.limit_key(),
            Place::Waiting | Place::Left => "train.timeout_seconds",
        }
    }

    /// The same answer as of `time` later.
    #[cfg(any(feature = "cuda", test))]
    pub(crate) fn after(mut self, time: Duration) -> Self {
        self.idle = self.idle.saturating_add(time);
        self
    }
}

impl fmt::Display for Busy {
    /// Part of a sentence: "rank 0 is in `save`: 41.0 of 96.0 GB, no progress for 60 s".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(&str, f64); 3] = [("GB", 1e9), ("MB", 1e6), ("kB", 1e3)];
        let Self {
            rank,
            phase,
            place,
            done,
            total,
            idle,
            ..
        } = self;
        match place {
            Place::Inside | Place::Waiting => write!(f, "rank {rank} is in `{phase}`: ")?,
            Place::Left => {
                let seconds = idle.as_secs_f64();
                return write!(
                    f,
                    "rank {rank} has left `{phase}`, and the others have been waiting for it for \
                    {seconds:.0} s"
                );
            }
        }
        let largest = (*done).max(*total) as f64;
        let (unit, size) = UNITS
            .into_iter()
            .find(|(_, size)| largest >= *size)
            .unwrap_or(UNITS[2]);
        let in_units = |bytes: u64| bytes as f64 / size;
        match (*done, *total) {
            (0, 0) => {}
            (done, 0) => write!(f, "{:.1} {unit} done, ", in_units(done))?,
            (done, total) => write!(
                f,
                "{:.1} of {:.1} {unit}, ",
                in_units(done),
                in_units(total)
            )?,
        }
        write!(f, "no progress for {:.0} s", idle.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_without_progress_is_described_with_what_it_has_done() {
        let busy = |done, total| {
            let idle = Duration::from_secs(60);
            let limit = Duration::from_secs(60);
            let place = Place::Inside;
            Busy {
                rank: 0,
                phase: Phase::Save,
                place,
                done,
                total,
                idle,
                limit,
            }
            .to_string()
        };
        let cases = [
            (41_000_000_000, 96_000_000_000, "41.0 of 96.0 GB, "),
            (0, 1_500_000, "0.0 of 1.5 MB, "),
            (12, 0, "0.0 kB done, "),
            (0, 0, ""),
        ];
        for (done, total, expected) in cases {
            let text = format!("rank 0 is in `save`: {expected}no progress for 60 s");
            assert_eq!(busy(done, total), text);
        }
    }

    #[test]
    fn the_limit_that_is_named_is_the_one_that_held() {
        let minute = Duration::from_secs(60);
        let of = |place| {
            let done = 0;
            let total = 0;
            let idle = Duration::ZERO;
            let phase = Phase::Start;
            let busy = Busy {
                rank: 2,
                phase,
                place,
                done,
                total,
                idle,
                limit: minute,
            };
            let busy = busy.after(minute);
            assert!(busy.left().is_zero());
            (busy.to_string(), busy.limit_key())
        };
        let (text, key) = of(Place::Inside);
        assert_eq!(
            (text.as_str(), key),
            (
                "rank 2 is in `start`: no progress for 60 s",
                "train.start_timeout_seconds"
            )
        );
        assert_eq!(of(Place::Waiting).1, "train.timeout_seconds");
        let (text, key) = of(Place::Left);
        let left = "rank 2 has left `start`, and the others have been waiting for it for 60 s";
        assert_eq!((text.as_str(), key), (left, "train.timeout_seconds"));
    }
}
