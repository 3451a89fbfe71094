//! The shapes of a cube's work; compile-time constants of the kernels.

use super::dropped::Dropped;
use super::products::MmaKind;
use super::tile::row_len;
use super::visible::Mask;

/// The shape of a cube's work in the forward pass.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(in crate::attention) struct Forward {
    pub(in crate::attention) d: usize,
    pub(in crate::attention) d_v: usize,
    /// Planes of a cube.
    pub(in crate::attention) planes: usize,
    /// Row blocks of 16 queries per plane.
    pub(in crate::attention) row_blocks: usize,
    /// Keys of a tile.
    pub(in crate::attention) keys: usize,
    pub(in crate::attention) mask: Mask,
    /// Whether scores are soft-capped.
    pub(in crate::attention) capped: bool,
    /// Whether scores have a bias by distance.
    pub(in crate::attention) biased: bool,
    pub(in crate::attention) dropped: Dropped,
    pub(in crate::attention) products: MmaKind,
}

impl Forward {
    /// Queries of a cube.
    pub(in crate::attention) fn queries(&self) -> usize {
        self.planes * self.row_blocks * 16
    }

    pub(super) fn units(&self) -> usize {
        self.planes * 32
    }

    /// Elements of a tile of keys and a tile of values. Shared memory has two of each: one is
    /// loaded while the other is multiplied.
    pub(super) fn stage(&self) -> usize {
        self.keys * (row_len(self.d) + row_len(self.d_v))
    }

    /// Elements of the cube's queries.
    fn own(&self) -> usize {
        self.queries() * row_len(self.d)
    }

    /// Elements in shared memory.
    pub(in crate::attention) fn shared(&self) -> usize {
        self.own() + 2 * self.stage()
    }
}

/// The shape of a cube's work in the backward pass.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(in crate::attention) struct Backward {
    pub(in crate::attention) d: usize,
    pub(in crate::attention) d_v: usize,
    /// Planes of a cube; each has 16 rows.
    pub(in crate::attention) planes: usize,
    /// Rows of the tiles that a cube loops over: queries where the cube has keys, keys where it has
    /// queries.
    pub(in crate::attention) tile: usize,
    pub(in crate::attention) mask: Mask,
    /// Whether scores are soft-capped.
    pub(in crate::attention) capped: bool,
    /// Whether scores have a bias by distance.
    pub(in crate::attention) biased: bool,
    pub(in crate::attention) dropped: Dropped,
    /// Whether the kernel computes the gradients of keys, and of values: both in one kernel if
    /// there are enough registers, neither in the kernel of queries.
    pub(in crate::attention) of_keys: bool,
    pub(in crate::attention) of_values: bool,
    pub(in crate::attention) products: MmaKind,
}

impl Backward {
    /// Rows of a cube.
    pub(in crate::attention) fn rows(&self) -> usize {
        16 * self.planes
    }

    pub(super) fn units(&self) -> usize {
        32 * self.planes
    }

    /// Elements of the cube's own rows.
    pub(super) fn own(&self) -> usize {
        self.rows() * (row_len(self.d) + row_len(self.d_v))
    }

    /// Elements of a pair of tiles in the loop. Shared memory has two pairs: one is loaded while
    /// the other is multiplied.
    pub(super) fn stage(&self) -> usize {
        self.tile * (row_len(self.d) + row_len(self.d_v))
    }

    /// Elements in shared memory.
    pub(in crate::attention) fn shared(&self) -> usize {
        self.own() + 2 * self.stage()
    }

    /// Elements in shared memory of the kernel of the bias, which loads all tiles of one sequence
    /// while it multiplies those of another.
    pub(in crate::attention) fn shared_by_sequences(&self) -> usize {
        2 * (self.own() + self.stage())
    }
}
