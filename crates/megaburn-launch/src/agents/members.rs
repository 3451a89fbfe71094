//! The hosts of a job, and which of them run the ranks of an attempt.

use std::{
    cmp::Reverse,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    order::SeatOrder,
    wire::{Connection, FromCoordinator, Hello},
};
use crate::{topology::Topology, verdict::Outcome};

/// A host with this number of failures of its own gives its place to a spare.
const REPEATED: usize = 2;
/// A launcher that gave no sign of life for so long is replaced by another one with its number.
const LATE: Duration = Duration::from_secs(3);

/// A launcher that has joined.
#[derive(Debug)]
pub(super) struct Member {
    /// The number of its connection.
    pub(super) id: usize,
    /// Its random digits.
    launcher: String,
    /// The number that it was started with.
    pub(super) node: usize,
    pub(super) host: String,
    /// Where its host is in the network.
    topology: Topology,
    pub(super) connection: Option<Arc<Connection>>,
    pub(super) last_sign: Instant,
    /// Its number among the hosts of the attempt that runs, or of the last one.
    pub(super) seat: Option<usize>,
    /// How its ranks ended in this attempt.
    pub(super) ended: Option<Outcome>,
    /// How often it caused a failure.
    pub(super) failures: usize,
    /// Whether it holds a process that does not end, so that it cannot run ranks again.
    pub(super) is_unfit: bool,
}

impl Member {
    /// `node 1 (host b)`.
    pub(super) fn name(&self) -> String {
        format!("node {} (host {})", self.node, self.host)
    }

    /// Sends a message. If that fails, the reader of its connection reports the end.
    pub(super) fn send(&mut self, message: &FromCoordinator) {
        let failed = |connection: &Arc<Connection>| connection.send(message).is_err();
        if self.connection.as_ref().is_some_and(failed) {
            self.connection = None;
        }
    }
}

/// The launchers of a job.
#[derive(Debug)]
pub(super) struct Members {
    nnodes: usize,
    pub(super) all: Vec<Member>,
    /// Hosts that have left: node, number of failures, whether unfit. A host that comes back keeps
    /// these.
    left: Vec<(usize, usize, bool)>,
    /// Where the hosts of seats are in the network.
    pub(super) order: SeatOrder,
}

impl Members {
    pub(super) fn new(nnodes: usize) -> Self {
        Self {
            nnodes,
            all: Vec::new(),
            left: Vec::new(),
            order: SeatOrder::default(),
        }
    }

    /// Adds a launcher.
    ///
    /// # Errors
    /// Another one has its number.
    pub(super) fn join(
        &mut self,
        id: usize,
        hello: &Hello,
        connection: Option<Arc<Connection>>,
        now: Instant,
    ) -> Result<(), String> {
        if let Some(other) = self.all.iter().find(|member| member.node == hello.node) {
            return Err(format!(
                "the launcher on host {} has `--node-rank {}` already; give each launcher its own",
                other.host, hello.node
            ));
        }
        let known = self.left.iter().find(|(node, ..)| *node == hello.node);
        let (failures, is_unfit) =
            known.map_or((0, false), |(_, failures, unfit)| (*failures, *unfit));
        self.all.push(Member {
            id,
            launcher: hello.launcher.clone(),
            node: hello.node,
            host: hello.host.clone(),
            topology: hello.topology.clone(),
            connection,
            last_sign: now,
            seat: None,
            ended: None,
            failures,
            is_unfit,
        });
        Ok(())
    }

    /// Returns the connection that this launcher replaces: its own earlier one, or one with the same
    /// node rank that gives no sign of life.
    pub(super) fn replaced_by(&self, hello: &Hello, now: Instant) -> Option<usize> {
        let is_replaced = |member: &&Member| {
            let is_silent = now.duration_since(member.last_sign) > LATE;
            member.launcher == hello.launcher || member.node == hello.node && is_silent
        };
        self.all.iter().find(is_replaced).map(|member| member.id)
    }

    pub(super) fn by_id(&mut self, id: usize) -> Option<&mut Member> {
        self.all.iter_mut().find(|member| member.id == id)
    }

    /// Removes a launcher and returns it. It counts as a failure of its host if it had ranks.
    pub(super) fn remove(&mut self, id: usize) -> Option<Member> {
        let at = self.all.iter().position(|member| member.id == id)?;
        let member = self.all.remove(at);
        self.left.retain(|(node, ..)| *node != member.node);
        let had_ranks = member.seat.is_some() && member.ended.is_none();
        let failures = member.failures + usize::from(had_ranks);
        self.left.push((member.node, failures, member.is_unfit));
        Some(member)
    }

    /// The number of hosts that can run ranks.
    pub(super) fn num_usable(&self) -> usize {
        self.all.iter().filter(|member| !member.is_unfit).count()
    }

    /// The member with this seat.
    pub(super) fn seated(&self, seat: usize) -> Option<&Member> {
        self.all.iter().find(|member| member.seat == Some(seat))
    }

    /// The seats that have a host, in the order in which their ranks are numbered.
    pub(super) fn seats_in_order(&mut self) -> Vec<usize> {
        let seated = self.all.iter();
        let seated = seated.filter_map(|member| Some((member.seat?, &member.topology)));
        self.order.learn(seated);
        let has_host = |seat: &usize| self.seated(*seat).is_some();
        self.order.seats().filter(has_host).collect()
    }

    /// Gives each seat to a host: to the one that had it, unless it failed repeatedly and another is
    /// free; else to the one with its number; else, if `may_use_spares`, to the free one that is
    /// nearest to its first host in the network; of these, to the one with the fewest failures. Node 0
    /// keeps seat 0. Returns the seats that stay free.
    pub(super) fn seat(&mut self, may_use_spares: bool) -> Vec<usize> {
        let is_reliable = |member: &Member| member.failures < REPEATED && !member.is_unfit;
        let mut spares = self
            .all
            .iter()
            .filter(|member| member.seat.is_none() && member.node >= self.nnodes)
            .filter(|member| is_reliable(member))
            .count();
        for member in &mut self.all {
            let is_first = member.node == 0;
            let may_leave = !is_first && !is_reliable(member);
            if member.is_unfit || member.seat.is_some() && may_leave && spares > 0 {
                spares = spares.saturating_sub(usize::from(!member.is_unfit));
                member.seat = None;
            }
        }
        let order = &self.order;
        let mut free = Vec::new();
        for seat in 0..self.nnodes {
            if self.all.iter().any(|member| member.seat == Some(seat)) {
                continue;
            }
            let candidates = self.all.iter_mut().filter(|member| {
                let is_own = member.node == seat;
                let is_possible = member.seat.is_none() && !member.is_unfit;
                is_possible && (is_own || seat > 0 && member.node > 0 && may_use_spares)
            });
            let best = candidates.min_by_key(|member| {
                (
                    member.failures >= REPEATED,
                    Reverse(member.node == seat),
                    Reverse(order.num_common(seat, &member.topology)),
                    member.failures,
                    member.node,
                )
            });
            match best {
                Some(member) => member.seat = Some(seat),
                None => free.push(seat),
            }
        }
        free
    }
}

#[cfg(test)]
pub(super) mod tests {
    use megaburn_collective::JobToken;

    use super::*;
    use crate::{agents::wire::Shape, options::LaunchOptions};

    /// Members with these numbers, for a job of two hosts.
    fn members(nodes: &[usize]) -> Members {
        let mut members = Members::new(2);
        for &node in nodes {
            join(&mut members, node).unwrap();
        }
        members
    }

    fn join(members: &mut Members, node: usize) -> Result<(), String> {
        join_at(members, node, "")
    }

    fn join_at(members: &mut Members, node: usize, path: &str) -> Result<(), String> {
        members.join(node, &hello(node, path), None, Instant::now())
    }

    /// What the launcher with a node rank says first, on a host at a place in the network.
    pub(in crate::agents) fn hello(node: usize, path: &str) -> Hello {
        let options = LaunchOptions::new(1, vec!["true".into()]).with_nodes(2, node);
        Hello {
            token: JobToken::default(),
            node,
            host: format!("host-{node}"),
            shape: Shape::of(&options),
            launcher: format!("launcher-{node}"),
            topology: Topology::parse(path).unwrap(),
            started: None,
        }
    }

    fn nodes_of_seats(members: &Members) -> Vec<Option<usize>> {
        let node = |seat| members.seated(seat).map(|member| member.node);
        (0..2).map(node).collect()
    }

    #[test]
    fn each_host_has_its_own_seat_and_spares_wait() {
        let mut members = members(&[2, 1, 0]);
        assert!(members.seat(true).is_empty());
        assert_eq!(nodes_of_seats(&members), [Some(0), Some(1)]);
        assert!(join(&mut members, 1).unwrap_err().contains("--node-rank 1"));
    }

    #[test]
    fn a_spare_takes_the_seat_of_a_lost_host_and_keeps_it() {
        let mut members = members(&[0, 1, 2]);
        members.seat(false);
        members.remove(1).unwrap();
        assert_eq!(members.seat(false), [1]);
        assert!(members.seat(true).is_empty());
        assert_eq!(nodes_of_seats(&members), [Some(0), Some(2)]);
        join(&mut members, 1).unwrap();
        members.seat(true);
        assert_eq!(nodes_of_seats(&members), [Some(0), Some(2)]);
    }

    #[test]
    fn the_nearest_spare_takes_a_seat_and_the_order_stays() {
        let mut members = Members::new(4);
        for (node, path) in ["s/a", "s/b", "s/a", "s/b", "r/b", "s/c", "s/b"]
            .iter()
            .enumerate()
        {
            join_at(&mut members, node, path).unwrap();
        }
        let start = |members: &mut Members| {
            members.seat(true);
            let nodes = members.seats_in_order().into_iter();
            let nodes: Vec<_> = nodes
                .map(|seat| members.seated(seat).unwrap().node)
                .collect();
            nodes
        };
        assert_eq!(start(&mut members), [0, 2, 1, 3]);
        members.remove(1).unwrap();
        assert_eq!(start(&mut members), [0, 2, 6, 3]);
        // Its own host comes from elsewhere, but the seat is where it was.
        members.remove(6).unwrap();
        join_at(&mut members, 1, "r/b").unwrap();
        assert_eq!(start(&mut members), [0, 2, 1, 3]);
        // No spare is left under its leaf, but one under its spine.
        members.remove(3).unwrap();
        assert_eq!(start(&mut members), [0, 2, 1, 5]);
        members.remove(2).unwrap();
        assert_eq!(start(&mut members), [0, 4, 1, 5]);
    }

    #[test]
    fn hosts_that_are_away_are_left_out_of_the_order() {
        let mut members = Members::new(3);
        for (node, path) in [(0, "b"), (1, "a")] {
            join_at(&mut members, node, path).unwrap();
        }
        assert_eq!(members.seat(true), [2]);
        assert_eq!(members.seats_in_order(), [0, 1]);
        join_at(&mut members, 2, "b").unwrap();
        members.seat(true);
        assert_eq!(members.seats_in_order(), [0, 2, 1]);
        members.remove(2).unwrap();
        assert_eq!(members.seats_in_order(), [0, 1]);
    }

    #[test]
    fn a_host_that_fails_repeatedly_gives_way_to_a_spare_but_not_to_nothing() {
        let mut members = members(&[0, 1]);
        members.seat(true);
        for node in [0, 1] {
            members.by_id(node).unwrap().failures = REPEATED;
        }
        assert!(members.seat(true).is_empty());
        assert_eq!(nodes_of_seats(&members), [Some(0), Some(1)]);
        join(&mut members, 2).unwrap();
        assert!(members.seat(true).is_empty());
        assert_eq!(nodes_of_seats(&members), [Some(0), Some(2)]);
        // The first host coordinates, so it stays.
        join(&mut members, 3).unwrap();
        members.seat(true);
        assert_eq!(nodes_of_seats(&members), [Some(0), Some(2)]);
        // The last resort is a host that failed.
        members.remove(2);
        members.remove(3);
        members.seat(true);
        assert_eq!(nodes_of_seats(&members), [Some(0), Some(1)]);
    }

    #[test]
    fn a_host_with_a_process_that_does_not_end_never_has_a_seat_again() {
        let mut members = members(&[0, 1]);
        members.seat(true);
        members.by_id(1).unwrap().is_unfit = true;
        assert_eq!(members.seat(true), [1]);
        members.remove(1);
        join(&mut members, 1).unwrap();
        assert_eq!(members.seat(true), [1]);
    }
}
