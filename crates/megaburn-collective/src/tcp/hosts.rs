//! Which ranks of which host have joined. The ranks of a host are started together, so a rank that
//! does not arrive soon after the others is hanging in its start, while other hosts may arrive much
//! later.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use crate::clock;

/// The hosts of ranks that have joined.
#[derive(Debug)]
pub(super) struct Hosts {
    /// How long a rank may arrive after the first one of its host.
    limit: Duration,
    known: BTreeMap<String, Known>,
}

#[derive(Debug)]
struct Known {
    first: Instant,
    ranks: Vec<usize>,
    /// How many ranks were started on the host.
    size: usize,
}

impl Hosts {
    pub(super) fn new(limit: Duration) -> Self {
        Self {
            limit,
            known: BTreeMap::new(),
        }
    }

    /// Records that a rank has joined from a host on which, by its own report, `size` ranks were
    /// started.
    pub(super) fn joined(&mut self, rank: usize, host: &str, size: Option<usize>) {
        let Some(size) = size else { return };
        let known = self.known.entry(host.to_string()).or_insert_with(|| Known {
            first: clock::now(),
            ranks: Vec::new(),
            size,
        });
        if !known.ranks.contains(&rank) {
            known.ranks.push(rank);
        }
    }

    /// Returns an error text if a host's ranks are late. It names which of the `missing` ranks must
    /// be on that host.
    pub(super) fn late(&self, missing: &[usize], world_size: usize) -> Option<String> {
        let now = clock::now();
        let late = |(_, known): &(&String, &Known)| {
            known.ranks.len() < known.size
                && now.saturating_duration_since(known.first) >= self.limit
        };
        let (host, known) = self.known.iter().find(late)?;
        let whose = if known.size == world_size {
            format!("ranks {missing:?} of {world_size}")
        } else {
            format!(
                "{} of the {} ranks of host {host} (some of {missing:?})",
                known.size - known.ranks.len(),
                known.size
            )
        };
        Some(format!(
            "{whose} did not join within {:.1} s of the first rank of their host \
            (`train.timeout_seconds`): they are stopped or hang during startup",
            self.limit.as_secs_f64()
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_host_that_has_begun_to_come_and_is_not_complete_is_late() {
        let mut hosts = Hosts::new(Duration::ZERO);
        hosts.joined(0, "a", Some(2));
        hosts.joined(0, "a", Some(2));
        let text = hosts.late(&[1], 2).unwrap();
        assert!(
            text.starts_with("ranks [1] of 2 did not join within 0.0 s"),
            "{text}"
        );
        let text = hosts.late(&[1, 2, 3], 4).unwrap();
        assert!(
            text.starts_with("1 of the 2 ranks of host a (some of [1, 2, 3])"),
            "{text}"
        );
        hosts.joined(1, "a", Some(2));
        hosts.joined(2, "b", None);
        assert_eq!(hosts.late(&[3], 4), None);
        let mut patient = Hosts::new(Duration::from_secs(60));
        patient.joined(0, "a", Some(2));
        assert_eq!(patient.late(&[1], 2), None);
    }
}
