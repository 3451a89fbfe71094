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

    /// Lets the hosts without ranks in this attempt end the ranks that wait for a restart, so that their
    /// GPUs are free.
    pub(super) fn free_others(&mut self) {
        let seats = &self.formation.seats;
        let has_ranks =
            |member: &&mut Member| member.seat.is_some_and(|seat| seats.contains(&seat));
        let others = self.members.all.iter_mut();
        let others = others.filter(|member| !has_ranks(member));
        others.for_each(|member| member.send(&FromCoordinator::LeftOut));
    }

    /// Whether ranks run on as many hosts as the job may have, and none of these is lost.
    pub(super) fn runs_on_all_hosts(&self) -> bool {
        let seats = &self.formation.seats;
        let is_there = |seat: &usize| self.members.seated(*seat).is_some();
        seats.len() == self.options.nnodes && seats.iter().all(is_there)
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

#[cfg(test)]
mod tests {
    use std::sync::{Arc, atomic::AtomicBool, mpsc::channel};

    use megaburn_collective::JobToken;

    use super::*;
    use crate::{
        agents::{
            formation::Formation,
            members::{Members, tests::hello},
            wire::Shape,
        },
        launched::Launch,
        options::LaunchOptions,
        restart::Restarts,
        verdict::RankEnd,
    };

    const LONG: Duration = Duration::from_secs(3600);

    /// A job of four hosts with a rank each, of which `least` and whole replicas of `of_replica` train.
    /// Only the hosts `nodes` are there, after all had their seats.
    fn attempts(least: usize, of_replica: usize, nodes: &[usize]) -> Attempts {
        let options = LaunchOptions::new(1, vec!["true".into()]);
        let options = options
            .with_nodes(4, 0)
            .with_min_nodes(Some(least))
            .with_nodes_per_replica(of_replica);
        let mut attempts = Attempts {
            members: Members::new(options.nnodes),
            restarts: Restarts::new(options.restart),
            shape: Shape::of(&options),
            options,
            addr: "host-0".into(),
            port: 29_500,
            token: JobToken::default(),
            launch: Launch::begin().unwrap(),
            incoming: channel().1,
            attempt: 0,
            formation: Formation::default(),
            outcome: Outcome::default(),
            cause: None,
            signal: None,
            is_over: Arc::new(AtomicBool::new(false)),
            has_started: true,
        };
        (0..4).for_each(|node| join(&mut attempts, node));
        attempts.members.seat(false);
        let lost = (0..4).filter(|node| !nodes.contains(node));
        lost.for_each(|node| drop(attempts.members.remove(node)));
        attempts
    }

    fn join(attempts: &mut Attempts, node: usize) {
        let now = Instant::now();
        let joined = attempts.members.join(node, &hello(node, ""), None, now);
        joined.unwrap();
    }

    /// The seats whose hosts start after this time.
    fn start(attempts: &mut Attempts, waited: Duration) -> Option<Vec<usize>> {
        let free = attempts.members.seat(true);
        attempts.seats_to_start(&free, waited)
    }

    #[test]
    fn a_restart_waits_for_a_lost_host_unless_it_is_silent() {
        let mut attempts = attempts(2, 1, &[0, 1, 3]);
        assert_eq!(start(&mut attempts, REJOIN / 2), None);
        assert_eq!(start(&mut attempts, REJOIN), Some(vec![0, 1, 3]));
        attempts.formation.has_silent_host = true;
        assert_eq!(start(&mut attempts, Duration::ZERO), Some(vec![0, 1, 3]));
    }

    #[test]
    fn a_job_that_begins_waits_longer_for_all_hosts() {
        let mut attempts = attempts(2, 1, &[0, 1, 3]);
        attempts.has_started = false;
        assert_eq!(start(&mut attempts, FIRST / 2), None);
        join(&mut attempts, 2);
        let all = start(&mut attempts, Duration::ZERO);
        assert_eq!(all, Some(vec![0, 1, 2, 3]));
    }

    #[test]
    fn too_few_hosts_do_not_start_nor_any_without_the_first_one() {
        assert_eq!(start(&mut attempts(3, 1, &[0, 2]), LONG), None);
        assert_eq!(start(&mut attempts(1, 1, &[1, 2, 3]), LONG), None);
        assert_eq!(start(&mut attempts(1, 1, &[0]), LONG), Some(vec![0]));
    }

    #[test]
    fn whole_replicas_start() {
        assert_eq!(
            start(&mut attempts(2, 2, &[0, 1, 3]), LONG),
            Some(vec![0, 1])
        );
        assert_eq!(start(&mut attempts(2, 2, &[0]), LONG), None);
    }

    #[test]
    fn ranks_are_asked_only_if_more_of_them_can_train() {
        let mut attempts = attempts(2, 2, &[0, 1]);
        attempts.formation.seats = start(&mut attempts, LONG).unwrap();
        join(&mut attempts, 2);
        attempts.regroup_if_more();
        assert!(!attempts.formation.is_regrouping, "half of a replica");
        join(&mut attempts, 3);
        attempts.members.by_id(3).unwrap().is_unfit = true;
        attempts.regroup_if_more();
        assert!(!attempts.formation.is_regrouping, "an unfit host");
        attempts.members.by_id(3).unwrap().is_unfit = false;
        attempts.regroup_if_more();
        assert!(attempts.formation.is_regrouping);
    }

    #[test]
    fn a_host_that_comes_back_is_needed_unless_all_others_run() {
        let mut attempts = attempts(2, 1, &[0, 1, 3]);
        attempts.formation.seats = start(&mut attempts, LONG).unwrap();
        assert!(!attempts.runs_on_all_hosts());
        join(&mut attempts, 4);
        attempts.formation.seats = start(&mut attempts, Duration::ZERO).unwrap();
        assert!(attempts.runs_on_all_hosts(), "with a spare");
        attempts.members.remove(1);
        assert!(!attempts.runs_on_all_hosts());
    }

    #[test]
    fn a_regrouping_is_no_failure_unless_a_rank_failed_meanwhile() {
        let mut attempts = attempts(1, 1, &[0, 1]);
        attempts.formation.seats = vec![0, 1];
        attempts.formation.is_regrouping = true;
        let end = |rank, by| RankEnd {
            rank,
            by,
            told: false,
            last_words: Vec::new(),
        };
        attempts.outcome.ends = vec![end(0, EndedBy::LostPeer)];
        assert!(!attempts.has_regrouped(), "a rank still runs");
        attempts.outcome.ends.push(end(1, EndedBy::Code(3)));
        assert!(!attempts.has_regrouped());
        attempts.outcome.ends[1].by = EndedBy::LostPeer;
        assert!(attempts.has_regrouped());
        let Phase::Hosts { .. } = attempts.begin_regrouped() else {
            panic!("it waits for hosts");
        };
        assert_eq!(attempts.attempt, 1);
        assert!(!attempts.outcome.is_failure());
    }
}
