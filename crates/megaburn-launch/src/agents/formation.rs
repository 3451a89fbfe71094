//! Which hosts run the ranks of an attempt.

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

#[cfg(test)]
mod tests {
    use super::*;

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
