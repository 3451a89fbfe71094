//! Which row is sent where: arithmetic on row counts, which the host knows.

use std::ops::Range;

/// A rank on an axis, and the size of the axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) rank: usize,
    pub(super) ranks: usize,
}

/// What a rank sends, and what its experts receive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Exchange {
    /// `[ep][messages]`: for each rank of `ep`, the ranges of this rank's expert-sorted rows that
    /// are sent to it, with one message per expert of that rank or a single one
    /// ([`new`](Self::new)).
    pub(super) send: Vec<Vec<Range<usize>>>,
    /// `[ep][messages]`: for each rank of `ep`, the ranges at which the rows from it are stored,
    /// with one message per expert of this rank or a single one.
    pub(super) recv: Vec<Vec<Range<usize>>>,
    /// The most rows that any rank of `etp` receives, to which all of them pad for the all-gather.
    pub(super) padded_rows: usize,
    /// The order in which this rank's experts read the `etp * padded_rows` rows of all ranks of
    /// `etp`.
    pub(super) order: Order,
}

/// The most messages per rank for which sending rows straight to their final place is worth it.
/// NCCL starts a kernel for about sixteen messages: on two H200s, 32 messages saved one of the 8 ms
/// of a DeepSeek proxy, while 128 took seven kernels, where a single one took less than half of
/// their time.
const MESSAGES: usize = 32;

/// Whether, with this number of experts, rows are received in the order in which they are read.
pub(super) fn arrive_in_order(num_experts: usize) -> bool {
    num_experts <= MESSAGES
}

impl Exchange {
    /// Plans the exchange from the number of rows that each rank of `ep` and `etp` has for each
    /// expert; ranks of one `ep` coordinate are neighbours.
    ///
    /// If the experts are few enough ([`arrive_in_order`]) and no other rows are inserted (from
    /// `etp`, or as padding), each pair of a rank and an expert is a message of its own, received
    /// where the expert reads it. Otherwise each pair of ranks is one message, and the rows are
    /// reordered after they arrive.
    pub(super) fn new(counts: &[Vec<usize>], ep: Place, etp: Place, is_padded: bool) -> Self {
        let num_experts = counts[0].len();
        let of_rank = num_experts / ep.ranks;
        let own = ep.rank * of_rank..(ep.rank + 1) * of_rank;
        let mine = &counts[ep.rank * etp.ranks + etp.rank];
        // For each rank of `etp`, and each sending rank, the counts for this rank's experts.
        let counts_of = |shard: usize| {
            let of = |from: usize| &counts[from * etp.ranks + shard][own.clone()];
            (0..ep.ranks).map(of).collect::<Vec<_>>()
        };
        let received_counts: Vec<Vec<&[usize]>> = (0..etp.ranks).map(counts_of).collect();
        let rows: Vec<usize> = (0..of_rank)
            .map(|expert| {
                received_counts
                    .iter()
                    .flatten()
                    .map(|counts| counts[expert])
                    .sum()
            })
            .collect();
        let send = of_members(consecutive_ranges(mine), of_rank);
        if etp.ranks == 1 && !is_padded && arrive_in_order(num_experts) {
            let by_expert =
                (0..of_rank).flat_map(|expert| received_counts[0].iter().map(move |of| of[expert]));
            let by_expert = consecutive_ranges(&by_expert.collect::<Vec<_>>());
            let from = |rank| {
                by_expert
                    .iter()
                    .skip(rank)
                    .step_by(ep.ranks)
                    .cloned()
                    .collect()
            };
            let recv = (0..ep.ranks).map(from).collect();
            let padded_rows = rows.iter().sum();
            return Self {
                send,
                recv,
                padded_rows,
                order: Order::identity(rows),
            };
        }
        let padded_rows = received_counts
            .iter()
            .map(|all| all.iter().copied().flatten().sum())
            .max()
            .unwrap_or(0);
        // The range of each pair of a sending rank and an expert, in the rows of one rank of `etp`.
        let received_ranges: Vec<Vec<_>> = received_counts
            .iter()
            .map(|all| consecutive_ranges(&all.concat()))
            .collect();
        let mut source_rows = Vec::with_capacity(rows.iter().sum());
        for expert in 0..of_rank {
            for (shard, all) in received_ranges.iter().enumerate() {
                for range in all.iter().skip(expert).step_by(of_rank) {
                    source_rows
                        .extend(shard * padded_rows + range.start..shard * padded_rows + range.end);
                }
            }
        }
        let order = Order {
            source_rows: Some(source_rows),
            rows,
            num_source_rows: padded_rows * etp.ranks,
        };
        let recv = of_members(received_ranges[etp.rank].clone(), of_rank);
        let [send, recv] = [send, recv].map(|all| all.iter().map(|of| vec![joined(of)]).collect());
        Self {
            send,
            recv,
            padded_rows,
            order,
        }
    }

    /// Rows that this rank sends, and that it receives over `ep`.
    pub(super) fn num_rows(&self) -> [usize; 2] {
        [&self.send, &self.recv].map(|all| all.iter().flatten().map(Range::len).sum())
    }
}

/// Consecutive ranges of these lengths.
fn consecutive_ranges(lens: &[usize]) -> Vec<Range<usize>> {
    let ranges = lens.iter().scan(0, |end, len| {
        let start = *end;
        *end += len;
        Some(start..*end)
    });
    ranges.collect()
}

fn of_members(all: Vec<Range<usize>>, of_member: usize) -> Vec<Vec<Range<usize>>> {
    all.chunks(of_member).map(<[_]>::to_vec).collect()
}

/// Joins adjacent ranges.
fn joined(all: &[Range<usize>]) -> Range<usize> {
    all.first().map_or(0, |first| first.start)..all.last().map_or(0, |last| last.end)
}

/// The order in which a rank's experts read rows: expert by expert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Order {
    /// `[sum(rows)]`: for each row that an expert reads, its index among the received rows;
    /// `num_source_rows` for padding. `None` means in the order received.
    source_rows: Option<Vec<usize>>,
    /// `[experts]`: rows of each expert of this rank.
    pub(super) rows: Vec<usize>,
    /// Number of received rows, including unused ones.
    num_source_rows: usize,
}

impl Order {
    /// The order of rows that are received as they are read.
    pub(super) fn identity(rows: Vec<usize>) -> Self {
        let num_source_rows = rows.iter().sum();
        Self {
            source_rows: None,
            rows,
            num_source_rows,
        }
    }

    /// Pads every expert to the same number of rows.
    ///
    /// # Panics
    /// If an expert has more rows.
    pub(super) fn padded(mut self, rows: usize) -> Self {
        let mut source_rows = Vec::with_capacity(rows * self.rows.len());
        let all = self
            .source_rows
            .take()
            .unwrap_or_else(|| (0..self.num_source_rows).collect());
        let mut rest = &all[..];
        for own in &mut self.rows {
            assert!(
                *own <= rows,
                "an expert has {own} rows, but its capacity is {rows}"
            );
            let (mine, others) = rest.split_at(*own);
            source_rows.extend_from_slice(mine);
            source_rows.resize(source_rows.len() + rows - *own, self.num_source_rows);
            rest = others;
            *own = rows;
        }
        Self {
            source_rows: Some(source_rows),
            ..self
        }
    }

    /// The index of each row, unless rows are received as they are read.
    pub(super) fn source_rows(&self) -> Option<&[usize]> {
        let source_rows = self.source_rows.as_deref()?;
        (!source_rows.iter().copied().eq(0..self.num_source_rows)).then_some(source_rows)
    }

    /// Whether some rows are padding.
    pub(super) fn is_padded(&self) -> bool {
        self.source_rows
            .iter()
            .flatten()
            .any(|source_row| *source_row == self.num_source_rows)
    }

    /// The inverse of these source rows: the row that reads each received row, or
    /// `source_rows.len()` for a received row that none reads.
    pub(super) fn inverse(&self, source_rows: &[usize]) -> Vec<usize> {
        let mut inverse = vec![source_rows.len(); self.num_source_rows];
        let rows = source_rows
            .iter()
            .enumerate()
            .filter(|(_, source_row)| **source_row < self.num_source_rows);
        rows.for_each(|(row, &source_row)| inverse[source_row] = row);
        inverse
    }
}

#[cfg(test)]
#[expect(clippy::single_range_in_vec_init, reason = "a member has one range")]
mod tests {
    use super::*;

    const ONE: Place = Place { rank: 0, ranks: 1 };

    fn of(counts: &[Vec<usize>], rank: usize, is_padded: bool) -> Exchange {
        Exchange::new(
            counts,
            Place {
                rank,
                ranks: counts.len(),
            },
            ONE,
            is_padded,
        )
    }

    #[test]
    fn rows_come_where_their_expert_reads_them() {
        // Two ranks with two experts each.
        let counts = [vec![1, 0, 2, 3], vec![4, 1, 0, 2]];
        let [first, second] = [0, 1].map(|rank| of(&counts, rank, false));
        assert_eq!(first.send, [vec![0..1, 1..1], vec![1..3, 3..6]]);
        assert_eq!(second.send, [vec![0..4, 4..5], vec![5..5, 5..7]]);
        // The rows of the first expert from both ranks, then of the second.
        assert_eq!(first.recv, [vec![0..1, 5..5], vec![1..5, 5..6]]);
        assert_eq!(second.recv, [vec![0..2, 2..5], vec![2..2, 5..7]]);
        assert_eq!((first.num_rows(), second.num_rows()), ([6, 6], [7, 7]));
        assert_eq!(
            (first.padded_rows, &first.order),
            (6, &Order::identity(vec![5, 1]))
        );
        assert_eq!(
            (second.padded_rows, &second.order),
            (7, &Order::identity(vec![2, 5]))
        );
        assert!(first.order.source_rows().is_none() && !first.order.is_padded());
    }

    #[test]
    fn what_one_rank_sends_is_what_another_expects() {
        let counts: Vec<Vec<usize>> = (0..3)
            .map(|rank| (0..6).map(|expert| (5 * rank + 3 * expert) % 4).collect())
            .collect();
        for is_padded in [false, true] {
            let all: Vec<_> = (0..3).map(|rank| of(&counts, rank, is_padded)).collect();
            for (from, to) in (0..3).flat_map(|from| (0..3).map(move |to| (from, to))) {
                let lens = |all: &[Range<usize>]| all.iter().map(Range::len).collect::<Vec<_>>();
                let sent = &all[from].send[to];
                let received = &all[to].recv[from];
                assert_eq!(lens(sent), lens(received), "{from} to {to}");
                assert_eq!(sent.len(), if is_padded { 1 } else { 2 });
            }
        }
    }

    /// An exchange whose rows are reordered, as for padding.
    fn two_of_each() -> Exchange {
        of(&[vec![1, 1, 0, 0], vec![2, 1, 0, 0]], 0, true)
    }

    #[test]
    fn an_expert_reads_what_all_ranks_sent_it() {
        let exchange = two_of_each();
        assert_eq!(
            (&exchange.send, &exchange.recv),
            (&vec![vec![0..2], vec![2..2]], &vec![vec![0..2], vec![2..5]])
        );
        let order = exchange.order;
        let source_rows = order.source_rows().unwrap();
        assert_eq!(
            (source_rows, &order.rows[..]),
            (&[0, 2, 3, 1, 4][..], &[3, 2][..])
        );
        assert_eq!(order.inverse(source_rows), [0, 3, 1, 2, 4]);
        assert!(!order.is_padded());
    }

    #[test]
    fn many_experts_are_put_in_order_when_rows_have_come() {
        let counts = [vec![1; 34], vec![2; 34]];
        let exchange = of(&counts, 1, false);
        assert_eq!(exchange.recv, [vec![0..17], vec![17..51]]);
        assert_eq!(&exchange.order.source_rows().unwrap()[..4], [0, 17, 18, 1]);
    }

    #[test]
    fn experts_are_padded_to_as_many_rows() {
        let padded = two_of_each().order.padded(4);
        let source_rows = padded.source_rows().unwrap();
        assert_eq!(
            (source_rows, &padded.rows[..]),
            (&[0, 2, 3, 5, 1, 4, 5, 5][..], &[4, 4][..])
        );
        assert_eq!(padded.inverse(source_rows), [0, 4, 1, 2, 5]);
        assert!(padded.is_padded());
        let padded = Order::identity(vec![0, 2]).padded(2);
        assert_eq!(
            (padded.source_rows(), &padded.rows[..]),
            (Some(&[2, 2, 0, 1][..]), &[2, 2][..])
        );
        assert!(
            Order::identity(vec![2, 2])
                .padded(2)
                .source_rows()
                .is_none()
        );
    }

    #[test]
    fn ranks_that_share_an_expert_read_the_same_rows() {
        // Two ranks share the matrices of one expert; the other expert is remote.
        let counts = [vec![1, 9], vec![3, 9], vec![2, 9], vec![0, 9]];
        let of = |rank| {
            let [ep, etp] = [Place { rank: 0, ranks: 2 }, Place { rank, ranks: 2 }];
            Exchange::new(&counts, ep, etp, false)
        };
        let [a, b] = [of(0), of(1)];
        assert_eq!(
            (&a.recv, &b.recv),
            (&vec![vec![0..1], vec![1..3]], &vec![vec![0..3], vec![3..3]])
        );
        assert_eq!((a.padded_rows, b.padded_rows), (3, 3));
        // Three rows from each rank of `etp`.
        assert!(a.order.source_rows().is_none() && a.order.rows == [6]);
        assert_eq!(a.order, b.order);
    }
}
