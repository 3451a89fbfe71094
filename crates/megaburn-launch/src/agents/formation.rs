//! How many hosts run the ranks of an attempt.

/// The hosts of an attempt.
#[derive(Debug, Default)]
pub(super) struct Formation {
    /// Their seats. The host of the first one has node rank 0, and so on.
    pub(super) seats: Vec<usize>,
    /// Whether ranks were asked to save and to wait for more hosts.
    pub(super) is_regrouping: bool,
    /// Whether one of them gave no sign of life any more. It will not be back at once.
    pub(super) has_silent_host: bool,
}

impl Formation {
    /// The seat of the host of a rank.
    pub(super) fn seat_of(&self, rank: usize, nproc: usize) -> usize {
        let seat = self.seats.get(rank / nproc);
        seat.copied().unwrap_or(rank / nproc)
    }

    /// The first rank of the host in a seat.
    pub(super) fn first_rank(&self, seat: usize, nproc: usize) -> usize {
        let at = self.seats.iter().position(|of| *of == seat);
        at.unwrap_or(seat) * nproc
    }
}

/// The number of hosts that train if `present` are there: the largest that divides `all`, so that the
/// batch can be split. `None` if it is less than `least`.
pub(super) fn num_hosts(all: usize, least: usize, present: usize) -> Option<usize> {
    let mut numbers = (least.max(1)..=present.min(all)).rev();
    numbers.find(|hosts| all.is_multiple_of(*hosts))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_hosts_train_as_divide_all() {
        for (present, hosts) in [
            (4, Some(4)),
            (3, Some(2)),
            (2, Some(2)),
            (1, None),
            (5, Some(4)),
        ] {
            assert_eq!(num_hosts(4, 2, present), hosts, "{present}");
        }
        assert_eq!(num_hosts(3, 3, 2), None);
    }

    #[test]
    fn ranks_are_numbered_over_the_hosts_that_train() {
        let formation = Formation {
            seats: vec![0, 2],
            ..Formation::default()
        };
        assert_eq!(formation.first_rank(2, 8), 8);
        assert_eq!(formation.seat_of(15, 8), 2);
    }
}
