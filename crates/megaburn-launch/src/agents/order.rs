//! The order of hosts in the network.

use std::{cmp::Ordering, collections::BTreeMap};

use crate::topology::Topology;

/// The order of the seats whose hosts have come: those under the same switch follow each other. It
/// changes only when a seat has a host for the first time.
#[derive(Debug, Default)]
pub(super) struct SeatOrder {
    /// For each seat that has had a host, where the first one is.
    places: BTreeMap<usize, Topology>,
    /// These seats in order.
    seats: Vec<usize>,
    /// A line about the order that launchers have not printed yet.
    news: Option<String>,
}

impl SeatOrder {
    /// Takes note of seats and where their hosts are. A seat whose place is known keeps it.
    pub(super) fn learn<'a>(&mut self, hosts: impl Iterator<Item = (usize, &'a Topology)>) {
        let known = self.places.len();
        for (seat, place) in hosts {
            self.places.entry(seat).or_insert_with(|| place.clone());
        }
        if self.places.len() > known {
            self.sort();
        }
    }

    /// The seats that have had hosts, in order. The first one has node rank 0, and so on.
    pub(super) fn seats(&self) -> impl Iterator<Item = usize> {
        self.seats.iter().copied()
    }

    /// How many switches are above both a host there and the first host of a seat.
    pub(super) fn num_common(&self, seat: usize, place: &Topology) -> usize {
        let of_seat = self.places.get(&seat);
        of_seat.map_or(0, |of_seat| of_seat.num_common(place))
    }

    /// Takes the line about the order that launchers have not printed yet.
    pub(super) fn take_news(&mut self) -> Option<String> {
        self.news.take()
    }

    fn sort(&mut self) {
        let numbered: Vec<_> = self.places.keys().copied().collect();
        let all = self.places.len();
        let known = self
            .places
            .values()
            .filter(|place| place.is_known())
            .count();
        if known < all {
            self.seats = numbered;
            self.news = (known > 0).then(|| {
                format!(
                    "only {known} of {all} hosts say where they are in the network: hosts stay in the \
                    order of `--node-rank`; give all launchers a `--topology`"
                )
            });
            return;
        }
        let mut sorted: Vec<_> = self.places.iter().collect();
        if let Some((_, first)) = sorted.first().copied() {
            // The sort is stable: hosts under the same switch keep their order.
            sorted.sort_by(|(_, a), (_, b)| compare(first, a, b));
        }
        self.seats = sorted.into_iter().map(|(seat, _)| *seat).collect();
        self.news = (self.seats != numbered).then(|| {
            let ranks = ranges(&self.seats);
            format!("hosts in the order of the network: node ranks {ranks}")
        });
    }
}

/// Compares two places. Of the parts below a switch, the one with the place `first` comes first,
/// then the hosts of this switch itself, then the other parts by their names.
fn compare(first: &Topology, a: &Topology, b: &Topology) -> Ordering {
    let level = a.num_common(b);
    let (in_a, in_b) = (a.switch(level), b.switch(level));
    if in_a.is_none() && in_b.is_none() {
        return Ordering::Equal;
    }
    let holds_first = first.num_common(a) >= level;
    match (first.switch(level), holds_first) {
        (of_first, true) if of_first == in_a => Ordering::Less,
        (of_first, true) if of_first == in_b => Ordering::Greater,
        _ => in_a.cmp(&in_b),
    }
}

/// Numbers in their order, with three or more that follow each other as a range: `0, 4-7, 1-3`.
fn ranges(numbers: &[usize]) -> String {
    let runs = numbers.chunk_by(|a, b| a + 1 == *b);
    let texts = runs.flat_map(|run| match run {
        [first, _, .., last] => vec![format!("{first}-{last}")],
        few => few.iter().map(usize::to_string).collect(),
    });
    texts.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// The order of hosts with these paths, by their node ranks.
    fn order_of(paths: &[&str]) -> SeatOrder {
        let mut order = SeatOrder::default();
        learn(&mut order, paths.iter().copied().enumerate());
        order
    }

    fn learn<'a>(order: &mut SeatOrder, paths: impl Iterator<Item = (usize, &'a str)>) {
        let places: Vec<_> = paths
            .map(|(seat, path)| (seat, Topology::parse(path).unwrap()))
            .collect();
        order.learn(places.iter().map(|(seat, place)| (*seat, place)));
    }

    #[rstest]
    #[case::in_turn(&["a", "b", "a", "b"], &[0, 2, 1, 3])]
    #[case::same_switch(&["a", "a", "a"], &[0, 1, 2])]
    #[case::by_name(&["b", "c", "a", "b"], &[0, 3, 2, 1])]
    #[case::first_in_the_middle(
        &["s2/m", "s1/a", "s3/a", "s2/z", "s2/a", "s1/b", "s2/m"],
        &[0, 6, 4, 3, 1, 5, 2]
    )]
    #[case::same_names_elsewhere(&["s2/b", "s1/a", "s1/b", "s2/a"], &[0, 3, 1, 2])]
    #[case::deeper(&["s/b", "s/a", "s", "s/b/x", "s/c", "r/b"], &[0, 3, 2, 1, 4, 5])]
    #[case::shallower(&["s", "s/b", "r", "s/a", "s", "r/a"], &[0, 4, 3, 1, 2, 5])]
    fn hosts_under_the_same_switch_follow_each_other(
        #[case] paths: &[&str],
        #[case] expected: &[usize],
    ) {
        let order = order_of(paths);
        assert_eq!(order.seats, expected);
    }

    #[test]
    fn the_order_of_many_hosts_is_total_and_keeps_each_switch_together() {
        let paths: Vec<_> = (0..60)
            .map(|host| format!("s{}/l{}", host * 7 % 3, host * 11 % 5))
            .collect();
        let order = order_of(&paths.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(order.seats[0], 0);
        for length in [2, 5] {
            let switches: Vec<_> = order.seats().map(|seat| &paths[seat][..length]).collect();
            let mut runs: Vec<_> = switches.chunk_by(|a, b| a == b).map(|run| run[0]).collect();
            let count = runs.len();
            runs.sort_unstable();
            runs.dedup();
            assert_eq!(runs.len(), count, "{switches:?}");
        }
    }

    #[test]
    fn what_differs_from_the_node_ranks_is_said_once() {
        let mut order = order_of(&["a", "b", "a", "b"]);
        let news = order.take_news().unwrap();
        assert_eq!(
            news,
            "hosts in the order of the network: node ranks 0, 2, 1, 3"
        );
        assert_eq!(order.take_news(), None);
        assert_eq!(order_of(&["a", "a", "b"]).take_news(), None);
        assert_eq!(order_of(&["", ""]).take_news(), None);
    }

    #[test]
    fn a_host_without_a_place_keeps_all_in_the_order_of_node_ranks() {
        let mut order = order_of(&["a", "b", "", "a"]);
        assert_eq!(order.seats, [0, 1, 2, 3]);
        let news = order.take_news().unwrap();
        assert!(news.starts_with("only 3 of 4 hosts say"), "{news}");
    }

    #[test]
    fn a_seat_keeps_its_place_and_a_new_one_is_put_in() {
        let mut order = order_of(&["a", "b"]);
        learn(&mut order, [(0, "a"), (1, "c"), (3, "a")].into_iter());
        assert_eq!(order.seats, [0, 3, 1]);
        assert_eq!(order.num_common(1, &Topology::parse("b").unwrap()), 1);
        order.take_news();
        learn(&mut order, [(1, ""), (3, "c")].into_iter());
        assert_eq!(order.seats, [0, 3, 1]);
        assert_eq!(order.take_news(), None);
    }

    #[test]
    fn long_lists_of_hosts_are_short() {
        assert_eq!(ranges(&[0, 4, 5, 6, 7, 1, 2]), "0, 4-7, 1, 2");
        assert_eq!(ranges(&[]), "");
    }
}
