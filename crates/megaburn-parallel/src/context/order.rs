//! Reorders positions between the members' chunks and the sequence.

use burn::tensor::{Device, Int, Tensor, TensorData};
use megaburn_kernels::{EmbeddingOptions, embedding};
use megaburn_mesh::{PackedRows, Zigzag};

/// The permutation between positions concatenated member by member, and positions in the order of
/// the span that the members hold together.
#[derive(Debug)]
pub(super) struct Order {
    /// For each row of the span, its row among the members' rows.
    to_sequence: Tensor<2, Int>,
    /// The inverse of `to_sequence`.
    to_members: Tensor<2, Int>,
}

/// The chunks of some neighbours, and the span that they form together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) members: Vec<Zigzag>,
    pub(super) whole: Zigzag,
}

impl Span {
    /// The span of all ranks, which hold full sequences together.
    pub(super) fn of_all(ranks: usize) -> Self {
        let members = (0..ranks).map(|rank| Zigzag::new(rank, ranks)).collect();
        Self {
            members,
            whole: Zigzag::WHOLE,
        }
    }
}

impl Order {
    /// The order of packed documents, for members that hold `[len, b]` positions each.
    pub(super) fn of_documents(
        documents: &PackedRows,
        Span { members, whole }: &Span,
        [len, b]: [usize; 2],
        on: &Device,
    ) -> Self {
        let rows = rows_of_documents(documents, members, *whole);
        debug_assert!(rows.len() == members.len() * len * b);
        Self::taking(&rows, on)
    }

    /// The order of sequences without documents: full chunks of all of them move together.
    pub(super) fn of_chunks(Span { members, whole }: &Span, on: &Device) -> Self {
        let chunks = 2 * members[0].ranks();
        let held: Vec<usize> = members.iter().flat_map(|rank| rank.chunks()).collect();
        let [front, back] = match whole.ranks() {
            1 => [0..chunks / 2, chunks / 2..chunks],
            _ => whole.ranges(chunks),
        };
        let place = |chunk| held.iter().position(|held| *held == chunk);
        let rows = front
            .chain(back)
            .map(|chunk| place(chunk).expect("one member holds every chunk"));
        Self::taking(&rows.collect::<Vec<_>>(), on)
    }

    /// Builds the permutation from the member row of each row of the span.
    fn taking(rows: &[usize], on: &Device) -> Self {
        let mut inverse = vec![0; rows.len()];
        rows.iter()
            .enumerate()
            .for_each(|(at, from)| inverse[*from] = at);
        let [to_sequence, to_members] = [rows, &inverse[..]].map(|rows| {
            let ids: Vec<i64> = rows.iter().map(|row| *row as i64).collect();
            Tensor::from_data(TensorData::new(ids, [rows.len(), 1]), on)
        });
        Self {
            to_sequence,
            to_members,
        }
    }

    /// Reorders the members' rows into the order of the span.
    pub(super) fn to_sequence(&self, x: Tensor<4>) -> Tensor<4> {
        taken(x, &self.to_sequence)
    }

    /// The inverse of [`to_sequence`](Self::to_sequence).
    pub(super) fn to_members(&self, x: Tensor<4>) -> Tensor<4> {
        taken(x, &self.to_members)
    }
}

/// For each row of `whole`, ordered by position and then by sequence, its index among the rows of
/// the members.
fn rows_of_documents(documents: &PackedRows, members: &[Zigzag], whole: Zigzag) -> Vec<usize> {
    let b = documents.num_rows();
    let len = documents.row_len();
    // The member row of each token of each sequence.
    let mut places = vec![0; len * b];
    let per_member = len / members[0].ranks();
    for row in 0..b {
        for (member, zigzag) in members.iter().enumerate() {
            for (at, token) in documents.tokens(row, *zigzag).enumerate() {
                places[token * b + row] = (member * per_member + at) * b + row;
            }
        }
    }
    let of_rows: Vec<Vec<usize>> = (0..b)
        .map(|row| documents.tokens(row, whole).collect())
        .collect();
    let count = of_rows.first().map_or(0, Vec::len);
    (0..count)
        .flat_map(|at| (0..b).map(move |row| (at, row)))
        .map(|(at, row)| places[of_rows[row][at] * b + row])
        .collect()
}

fn taken(x: Tensor<4>, order: &Tensor<2, Int>) -> Tensor<4> {
    let shape = x.dims();
    let rows = order.dims()[0];
    let table = x.reshape([rows, shape.iter().product::<usize>() / rows]);
    embedding(table, order.clone(), EmbeddingOptions::default()).reshape(shape)
}
