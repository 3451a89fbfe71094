//! Which row goes where: arithmetic on numbers that the host knows.

use std::ops::Range;

/// What a slot, one of the `top_k` of a token, has instead of an expert if it was dropped.
pub(in crate::moe) const DROPPED: u32 = u32::MAX;

/// The rows that a rank sends: those of one expert behind those of another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sent {
    /// The slot that each row is of.
    pub(super) slots: Vec<usize>,
    /// The row of each slot; as many as there are rows for one that was dropped.
    pub(super) rows: Vec<usize>,
    /// Rows for each expert.
    pub(super) counts: Vec<usize>,
}

impl Sent {
    pub(super) fn new(experts: &[u32], num_experts: usize) -> Self {
        let mut counts = vec![0; num_experts];
        let is_sent = |expert: &u32| *expert != DROPPED;
        experts.iter().filter(|e| is_sent(e)).for_each(|&expert| counts[expert as usize] += 1);
        let mut next: Vec<usize> = starts(&counts);
        let num_rows = counts.iter().sum();
        let mut slots = vec![0; num_rows];
        let row_of = |(slot, &expert): (usize, &u32)| {
            if !is_sent(&expert) {
                return num_rows;
            }
            let row = next[expert as usize];
            next[expert as usize] += 1;
            slots[row] = slot;
            row
        };
        let rows = experts.iter().enumerate().map(row_of).collect();
        Self { slots, rows, counts }
    }
}

/// The rows that a rank's experts read: those of one expert behind those of another, of which others have
/// copies that share these experts' matrices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Read {
    /// Rows that this rank sends to each rank of `ep`, and that come from each.
    pub(super) send: Vec<usize>,
    pub(super) recv: Vec<usize>,
    /// Rows that come to the one of `etp` to which the most come: as many everybody shows the others.
    pub(super) shown: usize,
    /// Where each row stands that an expert reads, among those that all of `etp` show; behind all of those where
    /// it is padding.
    pub(super) places: Vec<usize>,
    /// Rows of each expert.
    pub(super) rows: Vec<usize>,
    /// Whether some of them are padding.
    pub(super) is_padded: bool,
}

/// A rank and the ranks of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) rank: usize,
    pub(super) ranks: usize,
}

impl Read {
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
        Self { send, recv, shown, places, rows, is_padded: false }
    }
}

impl Read {
    /// The same, every expert reading as many rows.
    ///
    /// # Panics
    /// If one has more.
    pub(super) fn padded(mut self, rows: usize, etps: usize) -> Self {
        let padding = self.shown * etps;
        let mut places = Vec::with_capacity(rows * self.rows.len());
        let mut rest = &self.places[..];
        for own in &mut self.rows {
            assert!(*own <= rows, "an expert has {own} rows, and takes {rows}");
            let (mine, others) = rest.split_at(*own);
            places.extend_from_slice(mine);
            places.resize(places.len() + rows - *own, padding);
            (rest, *own) = (others, rows);
        }
        let is_padded = places.len() > self.places.len();
        Self { places, is_padded, ..self }
    }
}

/// The rows that a rank's experts read, where it knows the experts of all slots of all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Known {
    /// The slot that each row is of, among all; behind all of those where it is padding.
    pub(super) slots: Vec<usize>,
    /// The row of each slot; as many as there are rows for one that goes elsewhere.
    pub(super) rows: Vec<usize>,
    /// Rows of each expert of this rank.
    pub(super) counts: Vec<usize>,
    /// Whether some of them are padding.
    pub(super) is_padded: bool,
}

impl Known {
    /// Of the experts of all slots those in `own`.
    pub(super) fn new(experts: &[u32], own: Range<usize>) -> Self {
        let place = |expert: u32| match own.contains(&(expert as usize)) {
            true if expert != DROPPED => expert - own.start as u32,
            _ => DROPPED,
        };
        let experts: Vec<u32> = experts.iter().map(|&expert| place(expert)).collect();
        let Sent { slots, rows, counts } = Sent::new(&experts, own.len());
        Self { slots, rows, counts, is_padded: false }
    }

    /// The same, every expert reading as many rows.
    ///
    /// # Panics
    /// If one has more.
    pub(super) fn padded(self, to: usize, num_slots: usize) -> Self {
        let mut slots = Vec::with_capacity(to * self.counts.len());
        let mut rows = vec![to * self.counts.len(); num_slots];
        let mut rest = &self.slots[..];
        for own in &self.counts {
            assert!(*own <= to, "an expert has {own} rows, and takes {to}");
            let (mine, others) = rest.split_at(*own);
            (slots.len()..).zip(mine).for_each(|(row, &slot)| rows[slot] = row);
            slots.extend_from_slice(mine);
            slots.resize(slots.len() + to - *own, num_slots);
            rest = others;
        }
        let is_padded = slots.len() > self.slots.len();
        Self { slots, rows, counts: vec![to; self.counts.len()], is_padded }
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
    fn slots_are_sent_expert_by_expert_and_dropped_ones_are_not() {
        // Three tokens with two experts each, of three.
        let sent = Sent::new(&[2, 0, 1, DROPPED, 0, 2], 3);
        assert_eq!(sent.slots, [1, 4, 2, 0, 5]);
        assert_eq!(sent.rows, [3, 0, 2, 5, 1, 4]);
        assert_eq!(sent.counts, [2, 1, 2]);
        let none = Sent::new(&[DROPPED, DROPPED], 2);
        assert_eq!((none.slots.len(), none.rows, none.counts), (0, vec![0, 0], vec![0, 0]));
    }

    #[test]
    fn an_expert_reads_what_all_ranks_sent_it() {
        // Two ranks with two experts each.
        let counts = [vec![1, 0, 2, 3], vec![4, 1, 0, 2]];
        let of = |rank| Read::new(&counts, Place { rank, ranks: 2 }, Place { rank: 0, ranks: 1 });
        let first = of(0);
        assert_eq!((first.send, first.recv), (vec![1, 5], vec![1, 5]));
        assert_eq!((first.shown, first.rows), (6, vec![5, 1]));
        assert_eq!(first.places, [0, 1, 2, 3, 4, 5]);
        let second = of(1);
        assert_eq!((second.send, second.recv), (vec![5, 2], vec![5, 2]));
        assert_eq!((second.shown, second.rows), (7, vec![2, 5]));
        assert_eq!(second.places, [0, 1, 2, 3, 4, 5, 6]);
        // Those of the first expert of both, then those of the second.
        let counts = [vec![1, 1, 0, 0], vec![2, 1, 0, 0]];
        let read = Read::new(&counts, Place { rank: 0, ranks: 2 }, Place { rank: 0, ranks: 1 });
        assert_eq!(read.places, [0, 2, 3, 1, 4]);
    }

    #[test]
    fn experts_are_padded_to_as_many_rows() {
        let counts = [vec![1, 1, 0, 0], vec![2, 1, 0, 0]];
        let read = Read::new(&counts, Place { rank: 0, ranks: 2 }, Place { rank: 0, ranks: 1 });
        let padded = read.padded(4, 1);
        assert_eq!((padded.places, padded.rows), (vec![0, 2, 3, 5, 1, 4, 5, 5], vec![4, 4]));
    }

    #[test]
    fn of_all_slots_a_rank_reads_those_of_its_experts() {
        let known = Known::new(&[2, 0, 3, DROPPED, 1, 2], 2..4);
        assert_eq!((&known.slots[..], &known.counts[..]), (&[0, 5, 2][..], &[2, 1][..]));
        assert_eq!(known.rows, [0, 3, 2, 3, 3, 1]);
        let padded = known.padded(3, 6);
        assert_eq!((padded.slots, padded.counts), (vec![0, 5, 6, 2, 6, 6], vec![3, 3]));
        assert_eq!(padded.rows, [0, 6, 3, 6, 6, 1]);
    }

    #[test]
    fn ranks_that_share_an_expert_read_the_same_rows() {
        // One expert, whose matrices two ranks share, and another one.
        let counts = [vec![1, 9], vec![3, 9], vec![2, 9], vec![0, 9]];
        let of = |rank| Read::new(&counts, Place { rank: 0, ranks: 2 }, Place { rank, ranks: 2 });
        let [a, b] = [of(0), of(1)];
        assert_eq!((&a.recv, &b.recv), (&vec![1, 2], &vec![3, 0]));
        assert_eq!((a.shown, b.shown), (3, 3));
        // Three of the first one, three of the second one.
        assert_eq!(a.places, [0, 1, 2, 3, 4, 5]);
        assert_eq!((a.places, a.rows), (b.places, b.rows));
    }
}
