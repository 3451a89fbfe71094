//! Which row goes where: arithmetic on numbers of rows, which the host knows.

/// A rank and the ranks of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) rank: usize,
    pub(super) ranks: usize,
}

/// What a rank sends, and what comes to its experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Exchange {
    /// Rows that this rank sends to each rank of `ep`, and that come from each.
    pub(super) send: Vec<usize>,
    pub(super) recv: Vec<usize>,
    /// Rows that come to the one of `etp` to which the most come: as many everybody shows the others.
    pub(super) shown: usize,
    /// Of what all of `etp` show, which copies of these experts' matrices share.
    pub(super) order: Order,
}

impl Exchange {
    /// From the rows that each rank of `ep` and `etp` has for each expert; ranks of one `ep` coordinate are
    /// neighbours.
    pub(super) fn new(counts: &[Vec<usize>], ep: Place, etp: Place) -> Self {
        let of_rank = counts[0].len() / ep.ranks;
        let own = ep.rank * of_rank..(ep.rank + 1) * of_rank;
        let of = |ep: usize, shard: usize| &counts[ep * etp.ranks + shard];
        let mine = of(ep.rank, etp.rank);
        let send = mine.chunks(of_rank).map(|counts| counts.iter().sum()).collect();
        let came = |shard: usize| (0..ep.ranks).map(move |from| &of(from, shard)[own.clone()]);
        let came: Vec<Vec<&[usize]>> =
            (0..etp.ranks).map(|shard| came.clone()(shard).collect()).collect();
        let recv: Vec<usize> = came[etp.rank].iter().map(|counts| counts.iter().sum()).collect();
        let shown = came.iter().map(|all| all.iter().copied().flatten().sum()).max().unwrap_or(0);
        // Where what one rank sent to one expert begins, among those that one of `etp` shows.
        let begins: Vec<Vec<usize>> = came.iter().map(|all| starts(&all.concat())).collect();
        let (mut places, mut rows) = (Vec::new(), vec![0; of_rank]);
        for (expert, rows) in rows.iter_mut().enumerate() {
            for (shard, all) in came.iter().enumerate() {
                for (from, counts) in all.iter().enumerate() {
                    let start = shard * shown + begins[shard][from * of_rank + expert];
                    places.extend(start..start + counts[expert]);
                    *rows += counts[expert];
                }
            }
        }
        let order = Order { places, rows, num_places: shown * etp.ranks };
        Self { send, recv, shown, order }
    }
}

/// The order in which a rank's experts read rows: those of one expert behind those of another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Order {
    /// Where each row stands that an expert reads, among those that are there; behind all of those where it is
    /// padding.
    pub(super) places: Vec<usize>,
    /// Rows of each expert.
    pub(super) rows: Vec<usize>,
    /// Rows that are there, of which some may be nobody's.
    pub(super) num_places: usize,
}

impl Order {
    /// Of rows that stand as they are read.
    pub(super) fn as_they_are(rows: Vec<usize>) -> Self {
        let num_places = rows.iter().sum();
        Self { places: (0..num_places).collect(), rows, num_places }
    }

    /// The same, every expert reading as many rows.
    ///
    /// # Panics
    /// If one has more.
    pub(super) fn padded(mut self, rows: usize) -> Self {
        let mut places = Vec::with_capacity(rows * self.rows.len());
        let mut rest = &self.places[..];
        for own in &mut self.rows {
            assert!(*own <= rows, "an expert has {own} rows, and takes {rows}");
            let (mine, others) = rest.split_at(*own);
            places.extend_from_slice(mine);
            places.resize(places.len() + rows - *own, self.num_places);
            (rest, *own) = (others, rows);
        }
        Self { places, ..self }
    }

    /// Whether nothing is to be done.
    pub(super) fn is_as_they_are(&self) -> bool {
        self.places.iter().copied().eq(0..self.num_places)
    }

    /// Whether some rows are padding.
    pub(super) fn is_padded(&self) -> bool {
        self.places.contains(&self.num_places)
    }

    /// The row that each place has; as many as there are rows for one that has none.
    pub(super) fn back(&self) -> Vec<usize> {
        let mut back = vec![self.places.len(); self.num_places];
        let rows = self.places.iter().enumerate();
        let rows = rows.filter(|(_, place)| **place < self.num_places);
        rows.for_each(|(row, &place)| back[place] = row);
        back
    }
}

/// Where each of several stretches begins that stand one behind the other.
fn starts(lens: &[usize]) -> Vec<usize> {
    let starts = lens.iter().scan(0, |end, len| {
        let start = *end;
        *end += len;
        Some(start)
    });
    starts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expert_reads_what_all_ranks_sent_it() {
        // Two ranks with two experts each.
        let counts = [vec![1, 0, 2, 3], vec![4, 1, 0, 2]];
        let of =
            |rank| Exchange::new(&counts, Place { rank, ranks: 2 }, Place { rank: 0, ranks: 1 });
        let first = of(0);
        assert_eq!((first.send, first.recv), (vec![1, 5], vec![1, 5]));
        assert_eq!((first.shown, &first.order.rows), (6, &vec![5, 1]));
        assert!(first.order.is_as_they_are() && first.order.places.len() == 6);
        let second = of(1);
        assert_eq!((second.send, second.recv), (vec![5, 2], vec![5, 2]));
        assert_eq!((second.shown, &second.order.rows), (7, &vec![2, 5]));
        assert_eq!(second.order.places, [0, 1, 2, 3, 4, 5, 6]);
        // Those of the first expert of both, then those of the second.
        let order = two_of_each();
        assert_eq!(order.places, [0, 2, 3, 1, 4]);
        assert_eq!(order.back(), [0, 3, 1, 2, 4]);
        assert!(!order.is_as_they_are() && !order.is_padded());
    }

    fn two_of_each() -> Order {
        let counts = [vec![1, 1, 0, 0], vec![2, 1, 0, 0]];
        let [ep, etp] = [2, 1].map(|ranks| Place { rank: 0, ranks });
        Exchange::new(&counts, ep, etp).order
    }

    #[test]
    fn experts_are_padded_to_as_many_rows() {
        let padded = two_of_each().padded(4);
        assert_eq!(
            (&padded.places[..], &padded.rows[..]),
            (&[0, 2, 3, 5, 1, 4, 5, 5][..], &[4, 4][..])
        );
        assert_eq!(padded.back(), [0, 4, 1, 2, 5]);
        assert!(padded.is_padded());
        let padded = Order::as_they_are(vec![0, 2]).padded(2);
        assert_eq!((padded.places, padded.rows), (vec![2, 2, 0, 1], vec![2, 2]));
        assert!(Order::as_they_are(vec![2, 2]).padded(2).is_as_they_are());
    }

    #[test]
    fn ranks_that_share_an_expert_read_the_same_rows() {
        // One expert, whose matrices two ranks share, and another one.
        let counts = [vec![1, 9], vec![3, 9], vec![2, 9], vec![0, 9]];
        let of =
            |rank| Exchange::new(&counts, Place { rank: 0, ranks: 2 }, Place { rank, ranks: 2 });
        let [a, b] = [of(0), of(1)];
        assert_eq!((&a.recv, &b.recv), (&vec![1, 2], &vec![3, 0]));
        assert_eq!((a.shown, b.shown), (3, 3));
        // Three of the first one, three of the second one.
        assert_eq!(a.order.places, [0, 1, 2, 3, 4, 5]);
        assert_eq!(a.order, b.order);
    }
}
