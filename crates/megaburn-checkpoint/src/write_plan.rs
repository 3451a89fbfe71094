//! Which rank writes what: the ranks that hold the same values divide them evenly.

use std::{cmp::Reverse, collections::BTreeMap, ops::Range};

use burn::tensor::DType;
use megaburn_mesh::ShardSpec;

use crate::piece_index::PieceIndex;

/// The ranks that hold exactly the same part of a tensor, and this rank's position among them.
/// Copies along the tensor's own axis are not counted; its [`ShardSpec`] describes those.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Copies {
    /// This rank's position.
    pub index: usize,
    /// Number of ranks.
    pub count: usize,
}

impl Copies {
    /// No other rank holds this part.
    pub const ONE: Self = Self { index: 0, count: 1 };
}

/// The part of a tensor that a rank holds, without its values.
#[derive(Clone, Debug)]
pub struct HeldTensor<'a> {
    /// The tensor's name in the checkpoint: `model.` or an optimizer state's name, and the
    /// parameter's path.
    pub name: String,
    /// The part of the global tensor that this rank's local tensor is.
    pub shard: &'a ShardSpec,
    /// Element type.
    pub dtype: DType,
    /// The range of the flattened local tensor that this rank holds.
    pub range: Range<usize>,
    /// The ranks that hold the same range.
    pub copies: Copies,
}

/// A range of a piece of a shard that this rank writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WrittenPiece {
    /// The position of the piece in the shard.
    pub(crate) piece: usize,
    /// The range of the piece's elements in row-major order; not empty.
    pub(crate) range: Range<usize>,
    /// Whether the range is the full piece.
    pub(crate) is_full: bool,
}

/// What this rank writes of each tensor.
///
/// The ranks that hold copies of the same pieces put them one after the other, in an order that all
/// of them know, and cut the bytes into equal shares. So their shares differ by at most an element
/// per tensor, no messages are needed, and most pieces stay in one part.
///
/// Source: Megatron-LM `dist_checkpointing/strategies/fully_parallel.py` distributes full tensors
/// for the same purpose.
#[derive(Clone, Debug)]
pub struct WritePlan {
    pieces: Vec<Vec<WrittenPiece>>,
    num_bytes: u64,
}

/// A set of ranks that hold the same pieces: the copies along the tensor's axis and the others.
/// Experts have other axes.
type Holders = (bool, usize, usize);

/// A piece that several ranks hold.
struct Held {
    tensor: usize,
    piece: usize,
    len: usize,
    range: Range<usize>,
    size: usize,
}

impl WritePlan {
    /// Divides `tensors` among the ranks that hold them. Each rank calls it with its own tensors.
    pub fn new(tensors: &[HeldTensor<'_>]) -> Self {
        let mut order: Vec<usize> = (0..tensors.len()).collect();
        order.sort_by_key(|&at| (Reverse(tensors[at].dtype.size()), &tensors[at].name));
        let mut groups: BTreeMap<Holders, (usize, Vec<Held>)> = BTreeMap::new();
        for at in order {
            let HeldTensor {
                shard,
                range,
                copies,
                dtype,
                ..
            } = &tensors[at];
            for (piece, part) in shard.pieces.iter().enumerate() {
                // Further copies are on ranks outside the axis; see `ShardSpec::copy`.
                if part.replica >= part.replicas {
                    continue;
                }
                let index = PieceIndex::new(shard, part);
                let held = Held {
                    tensor: at,
                    piece,
                    len: index.len(),
                    range: index.within(range),
                    size: dtype.size(),
                };
                if held.range.is_empty() {
                    continue;
                }
                let holders = (shard.is_expert(), part.replicas, copies.count);
                let own = part.replica * copies.count + copies.index;
                let group = groups.entry(holders).or_insert((own, Vec::new()));
                group.1.push(held);
            }
        }
        let mut plan = Self {
            pieces: vec![Vec::new(); tensors.len()],
            num_bytes: 0,
        };
        for ((_, replicas, copies), (own, held)) in groups {
            plan.add_share(&held, own, replicas * copies);
        }
        for pieces in &mut plan.pieces {
            pieces.sort_by_key(|written| written.piece);
        }
        plan
    }

    /// Bytes of tensors that this rank writes.
    pub fn num_bytes(&self) -> u64 {
        self.num_bytes
    }

    /// Number of pieces that this rank writes.
    pub fn num_pieces(&self) -> usize {
        self.pieces.iter().map(Vec::len).sum()
    }

    /// What this rank writes of each tensor, in the order in which they were given.
    pub(crate) fn into_pieces(self) -> Vec<Vec<WrittenPiece>> {
        self.pieces
    }

    /// Adds share `own` of `ranks` equal shares of the pieces.
    fn add_share(&mut self, held: &[Held], own: usize, ranks: usize) {
        let total: u128 = held.iter().map(|held| held.num_bytes()).sum();
        let cut = |share: usize| total * share as u128 / ranks as u128;
        let mine = cut(own)..cut(own + 1);
        let mut start = 0;
        for held in held {
            // An element belongs to the share in which its first byte lies.
            let element = |byte: u128| {
                let elements = byte.saturating_sub(start).div_ceil(held.size as u128);
                (elements as usize).min(held.range.len()) + held.range.start
            };
            let range = element(mine.start)..element(mine.end);
            start += held.num_bytes();
            if !range.is_empty() {
                self.num_bytes += (range.len() * held.size) as u64;
                self.pieces[held.tensor].push(WrittenPiece {
                    piece: held.piece,
                    is_full: range.len() == held.len,
                    range,
                });
            }
        }
    }
}

impl Held {
    fn num_bytes(&self) -> u128 {
        (self.range.len() * self.size) as u128
    }
}

#[cfg(test)]
mod tests {
    use megaburn_mesh::{Axis, FusedPart};
    use proptest::prelude::*;

    use super::*;

    /// The specs of tensor-parallel rank `rank`: split, fused with replicated heads, replicated.
    fn shards(rank: usize, tp: usize, [a, b, c]: [usize; 3]) -> Vec<ShardSpec> {
        let heads = [FusedPart::units(4 * tp, a), FusedPart::units(2, b)];
        let width = heads.iter().map(FusedPart::size).sum();
        vec![
            ShardSpec::split_padded(&[c * 3, a], 0, tp * c * 3, Axis::Tp, rank, tp).unwrap(),
            ShardSpec::split(&[c, width], 1, &heads, Axis::Tp, rank, tp).unwrap(),
            ShardSpec::whole(&[7 * b], Axis::Tp, rank, tp),
            ShardSpec::whole(&[], Axis::Tp, rank, tp),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

        /// Every element is written once, and equal holders write equal shares, for copies and for
        /// ranges of them.
        #[test]
        fn every_element_is_written_once_and_shares_are_even(
            tp in prop::sample::select(vec![1usize, 2, 4]),
            (num_ranges, copies) in (1usize..4, 1usize..4),
            sizes in [1usize..5, 1usize..5, 1usize..5],
            dtypes in prop::collection::vec(
                prop::sample::select(vec![DType::F32, DType::BF16, DType::F64]), 4
            ),
        ) {
            let mut written: Vec<Vec<u32>> = Vec::new();
            let mut shares = Vec::new();
            for rank in 0..tp {
                let shards = shards(rank, tp, sizes);
                written.resize(shards.len(), Vec::new());
                for (part, copy) in (0..num_ranges).flat_map(|part| (0..copies).map(move |copy| (part, copy))) {
                    let held: Vec<_> = shards.iter().zip(&dtypes).enumerate().map(|(number, (shard, dtype))| {
                        let len: usize = shard.local_shape().iter().product();
                        HeldTensor {
                            name: format!("t{number}"),
                            shard,
                            dtype: *dtype,
                            range: part * len / num_ranges..(part + 1) * len / num_ranges,
                            copies: Copies { index: copy, count: copies },
                        }
                    }).collect();
                    let plan = WritePlan::new(&held);
                    shares.push(((rank, part), plan.num_bytes()));
                    let mut num_bytes = 0;
                    for (number, (held, pieces)) in held.iter().zip(plan.into_pieces()).enumerate() {
                        written[number].resize(held.shard.num_global(), 0);
                        for WrittenPiece { piece, range, is_full } in pieces {
                            let piece = &held.shard.pieces[piece];
                            let index = PieceIndex::new(held.shard, piece);
                            prop_assert_eq!(is_full, range == (0..index.len()));
                            num_bytes += range.len() * held.dtype.size();
                            let mut globals = Vec::new();
                            held.shard.for_each_run(piece, |_, global, len| globals.extend(global..global + len));
                            for global in &globals[range.clone()] {
                                written[number][*global] += 1;
                            }
                            prop_assert!(held.range.contains(&index.hull(&range).start));
                        }
                    }
                    prop_assert_eq!(num_bytes as u64, shares.last().unwrap().1);
                }
            }
            prop_assert!(written.iter().flatten().all(|times| *times == 1), "{:?}", written);
            // The copies of one part differ by at most the wide elements at their ends, for each
            // class of holders.
            for (place, bytes) in &shares {
                for (_, other) in shares.iter().filter(|(other, _)| other == place) {
                    prop_assert!(bytes.abs_diff(*other) <= 8 * 2 * 3, "{:?}", shares);
                }
            }
        }
    }
}
