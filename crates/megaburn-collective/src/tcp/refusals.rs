//! Who was refused at rank 0's port, for the message of a rendezvous that fails.

use std::{
    collections::BTreeMap,
    fmt,
    net::SocketAddr,
    time::{Duration, Instant},
};

use super::admission::Refusal;
use crate::clock;

/// More than so many say nothing new.
const KEPT: usize = 8;

/// Callers that do not belong to the job.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    first: Vec<String>,
    more: usize,
    /// When a caller that says it is a rank of this job was first refused, by the rank.
    ranks: BTreeMap<usize, Instant>,
}

impl Refusals {
    /// Takes note of one and logs it.
    pub(super) fn note(&mut self, from: SocketAddr, refusal: Refusal, master: &str) {
        let Refusal { why, rank, .. } = refusal;
        if let Some(rank) = rank {
            self.ranks.entry(rank).or_insert_with(clock::now);
        }
        let text = format!("{from} was refused: {why}");
        if self.first.len() < KEPT {
            tracing::warn!("rendezvous at {master}: {text}");
            self.first.push(text);
        } else {
            self.more += 1;
        }
    }

    /// What is wrong if a rank of `missing` was refused `limit` ago and nobody else has come in its place. A job
    /// without a token cannot tell its own ranks from another job's, so it waits that long for the right one.
    pub(super) fn late(&self, missing: &[usize], limit: Duration) -> Option<String> {
        let now = clock::now();
        let is_late = |rank: &&usize| {
            let refused = self.ranks.get(rank);
            refused.is_some_and(|&refused| now.saturating_duration_since(refused) >= limit)
        };
        let rank = missing.iter().find(is_late)?;
        let seconds = limit.as_secs_f64();
        Some(format!(
            "rank {rank} was refused, and no other came in its place within {seconds:.1} s (`train.timeout_seconds`)"
        ))
    }
}

impl fmt::Display for Refusals {
    /// As the end of a sentence; nothing if nobody was refused.
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
        assert_eq!(refusals.late(&[1, 2], Duration::ZERO), None);
        let refusal = Refusal { why: "it has seed 8".into(), ends_all: false, rank: Some(2) };
        refusals.note(from, refusal, "host:1");
        let text = refusals.late(&[1, 2], Duration::ZERO).unwrap();
        assert!(text.starts_with("rank 2 was refused"), "{text}");
        assert!(refusals.to_string().contains("it has seed 8"));
        assert_eq!(refusals.late(&[1], Duration::ZERO), None);
        assert_eq!(refusals.late(&[1, 2], Duration::from_secs(60)), None);
    }
}
