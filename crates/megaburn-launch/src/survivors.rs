//! The ranks of a host that wait for a restart in place.

use std::ops::Range;

use crate::rank_process::RankProcess;

/// Ranks that wait, and whether restarts in place have made progress.
#[derive(Debug, Default)]
pub(crate) struct Survivors {
    waiting: Vec<RankProcess>,
    /// The largest number of steps after which ranks lost a peer and restarted in place.
    failed_after: Option<u64>,
}

/// What becomes of ranks that wait.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// Those that restart in place, in order.
    pub(crate) kept: Vec<RankProcess>,
    /// Those that end.
    pub(crate) dismissed: Vec<RankProcess>,
    /// What to say about it.
    pub(crate) said: Vec<String>,
}

impl Survivors {
    /// Keeps the ranks of an attempt that wait.
    pub(crate) fn wait(&mut self, ranks: Vec<RankProcess>) {
        self.waiting.extend(ranks);
    }

    /// Takes all that wait.
    pub(crate) fn take_all(&mut self) -> Vec<RankProcess> {
        std::mem::take(&mut self.waiting)
    }

    /// Takes those that restart in place in an attempt in which this host has the ranks `ranks`. None
    /// does if ranks lost a peer again before they got further than the last time: the cause may then
    /// be in the processes themselves.
    pub(crate) fn take(&mut self, ranks: Range<usize>) -> Found {
        let mut found = Found::default();
        for rank in self.take_all() {
            match rank.is_alive() {
                true => found.kept.push(rank),
                false => found.dismissed.push(rank),
            }
        }
        if found.kept.is_empty() {
            return found;
        }
        found.kept.sort_by_key(|rank| rank.local_rank);
        let failed_after = found.kept.iter().filter_map(RankProcess::lost_after).max();
        let before = self.failed_after;
        self.failed_after = before.max(failed_after);
        match failed_after.filter(|step| before.is_some_and(|before| *step <= before)) {
            Some(step) => {
                let why = format!("no restart in place: ranks failed again after step {step}");
                found.said.push(why);
                found.dismissed.append(&mut found.kept);
            }
            None => found.said.push(describe(&found.kept, &ranks)),
        }
        found
    }
}

/// Says which ranks restart in place, and which are started anew.
fn describe(kept: &[RankProcess], ranks: &Range<usize>) -> String {
    let first = ranks.start;
    let is_kept = |rank: &usize| kept.iter().any(|kept| first + kept.local_rank == *rank);
    let (kept, anew): (Vec<_>, Vec<_>) = ranks.clone().partition(is_kept);
    let anew = match anew.is_empty() {
        true => String::new(),
        false => format!("; started anew: {}", list(&anew)),
    };
    format!("restart in place: {}{anew}", list(&kept))
}

/// `rank 3`, or `ranks 0, 1, 3`.
fn list(ranks: &[usize]) -> String {
    let plural = if ranks.len() == 1 { "" } else { "s" };
    let ranks: Vec<_> = ranks.iter().map(usize::to_string).collect();
    format!("rank{plural} {}", ranks.join(", "))
}
