//! Attempts with fewer hosts, and the return to more.

use std::time::{Duration, Instant};

use super::{
    attempts::{Attempts, Phase},
    members::Member,
    wire::{FromCoordinator, SILENCE},
};
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
        let mut seats = self.members.seats_in_order();
        seats.truncate(self.in_replicas(seats.len()));
        (seats.len() >= least).then_some(seats)
    }

    /// The most of some hosts that train: a multiple of the hosts of a replica.
    fn in_replicas(&self, hosts: usize) -> usize {
        hosts - hosts % self.options.nnodes_per_replica
    }

    /// Asks ranks to save and to wait, if more hosts are available than run ranks.
    pub(super) fn regroup_if_more(&mut self) {
        let all = self.options.nnodes;
        let running = self.formation.seats.len();
        if self.formation.is_regrouping || running == all {
            return;
        }
        let hosts = self.in_replicas(self.members.num_usable().min(all));
        if hosts <= running {
            return;
        }
        self.formation.is_regrouping = true;
        self.say(&format!(
            "{hosts} of {all} hosts are available: the ranks save, and restart on all of them"
        ));
        let attempt = self.attempt;
        self.send_all(&FromCoordinator::Regroup { attempt });
    }

    /// Asks again: a rank that was still starting did not hear it.
    pub(super) fn ask_again(&mut self, phase: Phase) {
        if self.formation.is_regrouping && matches!(phase, Phase::Ranks { end_at: None, .. }) {
            let attempt = self.attempt;
            self.send_all(&FromCoordinator::Regroup { attempt });
        }
    }

    /// The phase after all ranks wait because they were asked to.
    pub(super) fn begin_regrouped(&mut self) -> Phase {
        self.attempt += 1;
        self.cause = Some("other hosts came".into());
        // Nothing has failed, also if the job is asked to stop now.
        self.outcome = Outcome::default();
        Phase::Hosts {
            since: Instant::now(),
        }
    }

    /// Ends the connections of hosts that give no sign of life.
    pub(super) fn drop_silent(&mut self, phase: &mut Phase) {
        let is_silent = |member: &&Member| member.last_sign.elapsed() > SILENCE;
        let silent = self.members.all.iter().filter(is_silent);
        let silent: Vec<_> = silent.map(|member| member.id).collect();
        for id in silent {
            self.note_silence(id, true);
            let why = format!("no sign of life for {} s", SILENCE.as_secs());
            self.lose(id, &why, phase);
        }
    }

    /// Takes note of a host that is lost and had ranks, if it is silent.
    pub(super) fn note_silence(&mut self, id: usize, is_silent: bool) {
        let member = self.members.by_id(id);
        let had_ranks = member.is_some_and(|member| member.seat.is_some());
        self.formation.has_silent_host |= is_silent && had_ranks;
    }

    /// Whether all ranks wait because they were asked to.
    pub(super) fn has_regrouped(&self) -> bool {
        let Outcome { ends, signal } = &self.outcome;
        let waits = ends.iter().all(|end| end.by == EndedBy::LostPeer);
        let ranks = self.formation.seats.len() * self.options.nproc;
        self.formation.is_regrouping && signal.is_none() && waits && ends.len() == ranks
    }
}
