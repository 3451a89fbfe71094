//! The callers refused at rank 0's port, for the error message of a failed rendezvous.

use std::{
    collections::BTreeMap,
    fmt,
    net::SocketAddr,
    time::{Duration, Instant},
};

use super::{admission::Refusal, ended::Ended, wire::StartFailure};
use crate::clock;

/// How many refusals are reported in full; further ones are only counted.
const KEPT: usize = 8;

/// Callers that do not belong to the job.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    first: Vec<String>,
    more: usize,
    /// By rank: refused callers that claim to be a missing rank of this job.
    ranks: BTreeMap<usize, Refused>,
}

#[derive(Debug)]
struct Refused {
    /// When the first caller was refused.
    first: Instant,
    /// Why the last caller cannot start, if it reported that.
    failure: Option<StartFailure>,
}

impl Refusals {
    /// Records a refusal and logs it.
    pub(super) fn note(&mut self, from: SocketAddr, refusal: Refusal, master: &str) {
        let Refusal {
            why, rank, failure, ..
        } = refusal;
        if let Some(rank) = rank {
            let new = || Refused {
                first: clock::now(),
                failure: None,
            };
            self.ranks.entry(rank).or_insert_with(new).failure = failure;
        }
        let text = format!("{from} was refused: {why}");
        if self.first.len() < KEPT {
            tracing::warn!("rendezvous at {master}: {text}");
            self.first.push(text);
        } else {
            self.more += 1;
        }
    }

    /// Returns the reason to end the job if a rank of `missing` was refused `limit` ago and no
    /// other caller has taken its place: the rank's own failure, if it reported one. A job without
    /// a secret token cannot distinguish its own ranks from another job's, so it waits that long
    /// for the right one. A refusal is forgotten once its rank has joined.
    pub(super) fn late(&mut self, missing: &[usize], limit: Duration) -> Option<Ended> {
        self.ranks.retain(|rank, _| missing.contains(rank));
        let now = clock::now();
        let is_late = |refused: &&Refused| now.saturating_duration_since(refused.first) >= limit;
        let (rank, refused) = self.ranks.iter().find(|(_, refused)| is_late(refused))?;
        if let Some(failure) = &refused.failure {
            return Some(Ended::CannotStart(failure.clone()));
        }
        let seconds = limit.as_secs_f64();
        Some(Ended::Because(format!(
            "rank {rank} was refused, and no replacement connected within {seconds:.1} s \
            (`train.timeout_seconds`)"
        )))
    }
}

impl fmt::Display for Refusals {
    /// Writes the end of a sentence; nothing if no caller was refused.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for text in &self.first {
            write!(f, "; {text}")?;
        }
        match self.more {
            0 => Ok(()),
            more => write!(f, "; {more} more were refused"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_was_refused_is_waited_for_so_long_and_a_stranger_is_not() {
        let mut refusals = Refusals::default();
        let from = SocketAddr::from(([127, 0, 0, 1], 1));
        refusals.note(from, Refusal::of_stranger("it is silent".into()), "host:1");
        assert!(refusals.late(&[1, 2], Duration::ZERO).is_none());
        let why = || "it has seed 8".to_string();
        let refusal = || Refusal {
            rank: Some(2),
            ..Refusal::of_stranger(why())
        };
        refusals.note(from, refusal(), "host:1");
        assert!(refusals.late(&[1, 2], Duration::from_secs(60)).is_none());
        let Some(Ended::Because(text)) = refusals.late(&[1, 2], Duration::ZERO) else {
            panic!()
        };
        assert!(text.starts_with("rank 2 was refused"), "{text}");
        assert!(refusals.to_string().contains("it has seed 8"));
        let failure = StartFailure {
            rank: 2,
            why: "no data".into(),
            code: 2,
        };
        let failed = Refusal {
            failure: Some(failure.clone()),
            ..refusal()
        };
        refusals.note(from, failed, "host:1");
        let late = refusals.late(&[1, 2], Duration::ZERO);
        assert!(matches!(late, Some(Ended::CannotStart(found)) if found == failure));
    }

    #[test]
    fn a_refusal_is_forgotten_while_the_right_rank_is_there() {
        let mut refusals = Refusals::default();
        let from = SocketAddr::from(([127, 0, 0, 1], 1));
        let twice = || Refusal {
            rank: Some(1),
            ..Refusal::of_stranger("RANK=1 twice".into())
        };
        refusals.note(from, twice(), "host:1");
        // Rank 1 joins, then it connects anew: its time starts over.
        assert!(refusals.late(&[2], Duration::ZERO).is_none());
        assert!(refusals.late(&[1, 2], Duration::ZERO).is_none());
    }
}
