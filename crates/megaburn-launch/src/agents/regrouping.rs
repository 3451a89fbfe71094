//! Attempts with fewer hosts, and the return to more.

use std::time::Duration;

use super::{attempts::Attempts, wire::FromCoordinator};
use crate::verdict::{EndedBy, Outcome};

/// How long a restart waits for a host that was lost before it leaves the host out.
const REJOIN: Duration = Duration::from_secs(2);
/// How long a job that begins waits for all hosts before it leaves some out.
const FIRST: Duration = Duration::from_secs(30);

impl Attempts {
    /// The seats whose hosts start their ranks, in order, while the seats `free` have no host. `None`
    /// if there are too few hosts, or others may still come.
    pub(super) fn seats_to_start(
        &mut self,
        free: &[usize],
        waited: Duration,
    ) -> Option<Vec<usize>> {
        let all = self.options.nnodes;
        let least = self.options.min_nnodes.unwrap_or(all);
        let patience = match self.has_started {
            true if self.formation.has_silent_host => Duration::ZERO,
            true => REJOIN,
            false => FIRST,
        };
        // Node 0 coordinates, and never is without a seat.
        if free.first() == Some(&0) || !free.is_empty() && waited < patience {
            return None;
        }
        let seats = self.members.seats_in_order();
        (seats.len() >= least).then_some(seats)
    }

    /// Asks ranks to save and to wait, if more hosts are there than run ranks.
    pub(super) fn regroup_if_more(&mut self) {
        let all = self.options.nnodes;
        let running = self.formation.seats.len();
        if self.formation.is_regrouping || running == all {
            return;
        }
        let hosts = self.members.num_usable().min(all);
        if hosts <= running {
            return;
        }
        self.formation.is_regrouping = true;
        self.say(&format!(
            "{hosts} of {all} hosts are there: the ranks save, and restart on all of them"
        ));
        let attempt = self.attempt;
        self.send_all(&FromCoordinator::Regroup { attempt });
    }

    /// Whether all ranks wait because they were asked to.
    pub(super) fn has_regrouped(&self) -> bool {
        let Outcome { ends, signal } = &self.outcome;
        let waits = ends.iter().all(|end| end.by == EndedBy::LostPeer);
        let ranks = self.formation.seats.len() * self.options.nproc;
        self.formation.is_regrouping && signal.is_none() && waits && ends.len() == ranks
    }
}
