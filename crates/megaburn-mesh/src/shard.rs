use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{axis::Axis, error::MeshError};

/// A range of a split dimension that is split separately, e.g. the gate of a fused gate-up matrix
/// or the keys of a fused QKV.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FusedPart {
    /// The number of indivisible units: features of a plain matrix, heads of an attention
    /// projection.
    pub units: usize,
    /// The number of elements per unit along the dimension.
    pub unit: usize,
}

impl FusedPart {
    /// A part of `size` single elements.
    pub fn new(size: usize) -> Self {
        Self {
            units: size,
            unit: 1,
        }
    }

    /// A part of `units` units (heads) of `unit` elements each, which are never split.
    pub fn units(units: usize, unit: usize) -> Self {
        Self { units, unit }
    }

    /// The number of elements along the dimension.
    pub fn size(&self) -> usize {
        self.units * self.unit
    }

    /// The part that `rank` of `ranks` holds: an equal share or, if there are fewer units than
    /// ranks, one unit that `ranks / units` neighbours replicate. Returns (range within the part,
    /// replica, replicas).
    fn share(
        &self,
        axis: Axis,
        rank: usize,
        ranks: usize,
    ) -> Result<(Range<usize>, usize, usize), MeshError> {
        let Self { units, unit } = *self;
        if units.is_multiple_of(ranks) {
            let share = units / ranks * unit;
            return Ok((rank * share..(rank + 1) * share, 0, 1));
        }
        if units > 0 && ranks.is_multiple_of(units) {
            let replicas = ranks / units;
            let index = rank / replicas;
            return Ok((index * unit..(index + 1) * unit, rank % replicas, replicas));
        }
        Err(MeshError::Units {
            units,
            unit,
            ranks,
            axis: axis.name(),
        })
    }
}

/// A contiguous range of a shard along its split dimension.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardPiece {
    /// Its range in the global tensor.
    pub global: Range<usize>,
    /// Its range in the local tensor.
    pub local: Range<usize>,
    /// The index of this copy. Copy 0 is the owner: it counts in norms. Checkpoints are written by
    /// all copies, each a share.
    pub replica: usize,
    /// The number of ranks along the axis that hold this range.
    pub replicas: usize,
}

/// The part of a global tensor that a rank holds.
///
/// Initialization, gradient norms, checkpoints, resharding and export depend only on this. The
/// data-parallel axes are not mentioned, because every data-parallel rank holds the same shard; nor
/// is the expert-parallel axis, because its ranks hold different experts.
///
/// After nanotron's `src/nanotron/parallel/parameters.py`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardSpec {
    /// The shape of the unsharded tensor, without padding.
    pub global_shape: Vec<usize>,
    /// The axis that splits or replicates it.
    pub axis: Axis,
    /// The dimension that is split (0 for a replicated tensor).
    pub dim: usize,
    /// The pieces that this rank holds along `dim`, in local order.
    pub pieces: Vec<ShardPiece>,
    /// The local length along `dim`: the pieces, followed by padding that belongs to no global
    /// element and stays zero.
    pub local_len: usize,
}

impl ShardSpec {
    /// A tensor that every rank of the axis holds unsharded.
    pub fn whole(global_shape: &[usize], axis: Axis, rank: usize, ranks: usize) -> Self {
        let len = global_shape.first().copied().unwrap_or(1);
        Self {
            global_shape: global_shape.to_vec(),
            axis,
            dim: 0,
            pieces: vec![ShardPiece {
                global: 0..len,
                local: 0..len,
                replica: rank,
                replicas: ranks,
            }],
            local_len: len,
        }
    }

    /// A tensor whose dimension `dim` is the concatenation of `parts`, each split over the axis.
    ///
    /// The parts do not add up to the dimension, or a part has a number of units that is neither a
    /// multiple nor a divisor of the number of ranks.
    pub fn split(
        global_shape: &[usize],
        dim: usize,
        parts: &[FusedPart],
        axis: Axis,
        rank: usize,
        ranks: usize,
    ) -> Result<Self, MeshError> {
        let size = global_shape[dim];
        let sum: usize = parts.iter().map(FusedPart::size).sum();
        if sum != size {
            let global_shape = global_shape.to_vec();
            return Err(MeshError::Parts {
                global_shape,
                dim,
                size,
                parts: sum,
            });
        }
        let mut start = 0;
        let mut local_len = 0;
        let mut pieces = Vec::with_capacity(parts.len());
        for part in parts {
            let (range, replica, replicas) = part.share(axis, rank, ranks)?;
            let local = local_len..local_len + range.len();
            local_len = local.end;
            let global = start + range.start..start + range.end;
            pieces.push(ShardPiece {
                global,
                local,
                replica,
                replicas,
            });
            start += part.size();
        }
        Ok(Self {
            global_shape: global_shape.to_vec(),
            axis,
            dim,
            pieces,
            local_len,
        })
    }

    /// A tensor whose dimension `dim` is padded to `padded` and then split evenly, e.g. a
    /// vocabulary.
    ///
    /// # Errors
    /// `padded` is not divisible by the number of ranks.
    pub fn split_padded(
        global_shape: &[usize],
        dim: usize,
        padded: usize,
        axis: Axis,
        rank: usize,
        ranks: usize,
    ) -> Result<Self, MeshError> {
        if !padded.is_multiple_of(ranks) {
            return Err(MeshError::Units {
                units: padded,
                unit: 1,
                ranks,
                axis: axis.name(),
            });
        }
        let local_len = padded / ranks;
        let size = global_shape[dim];
        let global = (rank * local_len).min(size)..((rank + 1) * local_len).min(size);
        let local = 0..global.len();
        let pieces = vec![ShardPiece {
            global,
            local,
            replica: 0,
            replicas: 1,
        }];
        Ok(Self {
            global_shape: global_shape.to_vec(),
            axis,
            dim,
            pieces,
            local_len,
        })
    }

    /// Marks this part as copy `copy` of a tensor that ranks outside the axis hold, too, e.g. of a
    /// matrix that two pipeline stages use.
    #[must_use]
    pub fn copy(mut self, copy: usize) -> Self {
        for piece in &mut self.pieces {
            piece.replica += copy * piece.replicas;
        }
        self
    }

    /// Whether it belongs to an expert. Experts have copies on the ranks along `edp` only; other
    /// parameters have copies on the ranks along `dp` and `cp`.
    pub fn is_expert(&self) -> bool {
        matches!(self.axis, Axis::Etp | Axis::Ep)
    }

    /// The shape of the local tensor, including padding.
    pub fn local_shape(&self) -> Vec<usize> {
        let mut shape = self.global_shape.clone();
        if let Some(len) = shape.get_mut(self.dim) {
            *len = self.local_len;
        }
        shape
    }

    /// The number of elements of the unsharded tensor.
    pub fn num_global(&self) -> usize {
        self.global_shape.iter().product()
    }

    /// The pieces that this rank owns. Over all ranks of the axis they cover the tensor exactly
    /// once.
    pub fn owned(&self) -> impl Iterator<Item = &ShardPiece> {
        self.pieces
            .iter()
            .filter(|piece| piece.replica == 0 && !piece.global.is_empty())
    }

    /// Whether this rank owns all that it holds, so that the local tensor can be used without
    /// slicing.
    pub fn owns_all(&self) -> bool {
        let held: usize = self.owned().map(|piece| piece.local.len()).sum();
        held == self.local_len
    }

    /// Calls `f(local offset, global offset, length)` for each contiguous run of elements of the
    /// piece, in row-major order.
    pub fn for_each_run(&self, piece: &ShardPiece, mut f: impl FnMut(usize, usize, usize)) {
        let outer: usize = self.global_shape[..self.dim.min(self.global_shape.len())]
            .iter()
            .product();
        let inner: usize = self.global_shape.iter().skip(self.dim + 1).product();
        let global_len = self.global_shape.get(self.dim).copied().unwrap_or(1);
        for row in 0..outer {
            f(
                (row * self.local_len + piece.local.start) * inner,
                (row * global_len + piece.global.start) * inner,
                piece.local.len() * inner,
            );
        }
    }
}

/// The vocabulary size, padded to a multiple of `multiple * tp` so that it splits evenly.
///
/// Source: Megatron-LM `megatron/training/vocab_utils.py` (there `multiple` is 128).
pub fn pad_vocab(vocab: usize, multiple: usize, tp: usize) -> usize {
    vocab.next_multiple_of(multiple.max(1) * tp)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn fewer_kv_heads_than_ranks_are_replicated() {
        // 8 query heads and 2 key/value heads of width 4 over 4 ranks: [q | k | v].
        let parts = [
            FusedPart::units(8, 4),
            FusedPart::units(2, 4),
            FusedPart::units(2, 4),
        ];
        let spec = ShardSpec::split(&[16, 48], 1, &parts, Axis::Tp, 3, 4).unwrap();
        assert_eq!(spec.local_shape(), [16, 16]);
        let held: Vec<_> = spec
            .pieces
            .iter()
            .map(|p| (p.global.clone(), p.replica))
            .collect();
        assert_eq!(held, [(24..32, 0), (36..40, 1), (44..48, 1)]);
        assert!(!spec.owns_all());
    }

    #[test]
    fn a_padded_vocabulary_keeps_its_logical_shape() {
        assert_eq!(pad_vocab(260, 128, 2), 512);
        assert_eq!(pad_vocab(131073, 128, 4), 131584);
        let spec = ShardSpec::split_padded(&[260, 8], 0, 512, Axis::Tp, 1, 2).unwrap();
        assert_eq!(spec.pieces[0].global, 256..260);
        assert_eq!(spec.local_shape(), [256, 8]);
        assert!(!spec.owns_all());
    }

    #[test]
    fn of_two_copies_one_is_owned() {
        let spec = |rank| ShardSpec::whole(&[3, 2], Axis::Tp, rank, 2);
        for (rank, copy, replica) in [(0, 0, 0), (1, 0, 1), (0, 1, 2), (1, 1, 3)] {
            let spec = spec(rank).copy(copy);
            assert_eq!(
                (spec.pieces[0].replica, spec.pieces[0].replicas),
                (replica, 2)
            );
            assert_eq!(spec.owns_all(), replica == 0);
        }
    }

    #[test]
    fn parts_that_do_not_fit_are_errors() {
        let error =
            ShardSpec::split(&[4, 10], 1, &[FusedPart::new(8)], Axis::Tp, 0, 2).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("has size 10, but its parts add up to 8"),
            "{error}"
        );
        let error = ShardSpec::split(&[9], 0, &[FusedPart::new(9)], Axis::Tp, 0, 2).unwrap_err();
        assert!(error.to_string().contains("9 units"), "{error}");
    }

    /// Counts the owners of every global element, and checks that local runs are in bounds.
    fn tile(specs: &[ShardSpec]) -> Vec<usize> {
        let mut owners = vec![0; specs[0].num_global()];
        for spec in specs {
            let local: usize = spec.local_shape().iter().product();
            for piece in spec.owned() {
                spec.for_each_run(piece, |l, g, n| {
                    assert!(l + n <= local);
                    owners[g..g + n].iter_mut().for_each(|o| *o += 1);
                });
            }
        }
        owners
    }

    proptest! {
        #[test]
        fn shards_tile_the_tensor_exactly_once(
            ranks in 1usize..9,
            outer in 1usize..4,
            inner in 1usize..4,
            units in prop::collection::vec((1usize..9, 1usize..4), 1..4),
            dim in 0usize..3,
        ) {
            let parts: Vec<FusedPart> = units.iter().map(|&(u, n)| FusedPart::units(u, n)).collect();
            let size: usize = parts.iter().map(FusedPart::size).sum();
            let mut shape = vec![outer, inner];
            shape.insert(dim, size);
            let specs: Result<Vec<_>, _> = (0..ranks)
                .map(|rank| ShardSpec::split(&shape, dim, &parts, Axis::Tp, rank, ranks))
                .collect();
            let possible = units.iter().all(|&(u, _)| u % ranks == 0 || ranks % u == 0);
            prop_assert_eq!(specs.is_ok(), possible);
            if let Ok(specs) = specs {
                prop_assert!(tile(&specs).iter().all(|&owners| owners == 1));
            }
        }

        #[test]
        fn padded_and_whole_tensors_are_owned_once(ranks in 1usize..9, vocab in 1usize..40, multiple in 1usize..8) {
            let padded = pad_vocab(vocab, multiple, ranks);
            let shape = [vocab, 3];
            let specs: Vec<_> = (0..ranks)
                .map(|r| ShardSpec::split_padded(&shape, 0, padded, Axis::Tp, r, ranks).unwrap())
                .collect();
            prop_assert!(tile(&specs).iter().all(|&owners| owners == 1));
            let whole: Vec<_> =
                (0..ranks).map(|r| ShardSpec::whole(&shape, Axis::Tp, r, ranks)).collect();
            prop_assert!(tile(&whole).iter().all(|&owners| owners == 1));
        }
    }
}
