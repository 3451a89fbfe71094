//! In which order the positions of members stand.

use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor, TensorData};
use megaburn_kernels::{EmbeddingOptions, embedding};
use megaburn_mesh::{PackedRows, Zigzag};

use super::Mask;

/// Between positions as members hold them, one member's stretch behind the other's, and as they stand in
/// the stretch that all these are of.
#[derive(Debug)]
pub(super) struct Order {
    /// Which row of the members' each of the stretch is.
    to_sequence: Tensor<2, Int>,
    /// The inverse.
    to_members: Tensor<2, Int>,
}

/// The stretches of neighbours, and what they are together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) members: Vec<Zigzag>,
    pub(super) whole: Zigzag,
}

impl Span {
    /// Of all ranks, which hold whole sequences together.
    pub(super) fn of_all(ranks: usize) -> Self {
        let members = (0..ranks).map(|rank| Zigzag::new(rank, ranks)).collect();
        Self {
            members,
            whole: Zigzag::WHOLE,
        }
    }
}

impl Order {
    /// Of members that hold `[len, b]` positions each.
    pub(super) fn of(mask: &Mask, span: Span, [len, b]: [usize; 2], on: &Device) -> Arc<Self> {
        if let Some(documents) = &mask.documents {
            return documents.order(span, |Span { members, whole }| {
                let rows = of_documents(documents.documents(), members, *whole);
                debug_assert!(rows.len() == members.len() * len * b);
                Self::taking(&rows, on)
            });
        }
        // Whole chunks, each of all sequences.
        let Span { members, whole } = span;
        let chunks = 2 * members[0].ranks();
        let held: Vec<usize> = members.iter().flat_map(|rank| rank.chunks()).collect();
        let [front, back] = match whole.ranks() {
            1 => [0..chunks / 2, chunks / 2..chunks],
            _ => whole.ranges(chunks),
        };
        let place = |chunk| held.iter().position(|held| *held == chunk);
        let rows = front
            .chain(back)
            .map(|chunk| place(chunk).expect("a member has it"));
        Arc::new(Self::taking(&rows.collect::<Vec<_>>(), on))
    }

    /// Which row of the members' each of the stretch is.
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

    /// Rows of members as they stand in the stretch.
    pub(super) fn to_sequence(&self, x: Tensor<4>) -> Tensor<4> {
        taken(x, &self.to_sequence)
    }

    /// The inverse of [`to_sequence`](Self::to_sequence).
    pub(super) fn to_members(&self, x: Tensor<4>) -> Tensor<4> {
        taken(x, &self.to_members)
    }
}

/// Rows, in the order of positions and then of sequences, as `whole` has them, by where members do.
fn of_documents(documents: &PackedRows, members: &[Zigzag], whole: Zigzag) -> Vec<usize> {
    let b = documents.num_rows();
    let len = documents.row_len();
    // Where each token of each sequence is.
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
