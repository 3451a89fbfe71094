//! The gradients, with scores and probabilities made anew: `P = exp(S - lse)`,
//! `dS = P * (dO V^T - delta)`, `dV = P^T dO`, `dK = dS^T Q * scale`, `dQ = dS K * scale`.
//!
//! Source: Dao, FlashAttention-2 (2023), <https://arxiv.org/abs/2307.08691>, algorithm 2; the sums
//! over keys and those over queries are two kernels here, so that each sum has one order and one
//! owner: no atomics, the same bits each time. A plane has 16 rows, keys in the one and queries in
//! the other; scores have that orientation, and pass from one product to the next in registers.

use super::dropped::Dropped;
use super::products::MmaKind;
use super::tile::row_len;
use super::visible::Mask;

/// The shape of the work of a cube.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(super) struct Backward {
    pub(super) d: usize,
    pub(super) d_v: usize,
    /// Planes of a cube; each has 16 rows.
    pub(super) planes: usize,
    /// Rows of the tiles that come by: queries where the cube has keys, keys where it has queries.
    pub(super) tile: usize,
    pub(super) mask: Mask,
    /// Whether scores are under a cap.
    pub(super) capped: bool,
    pub(super) dropped: Dropped,
    /// Which gradients of keys and of values: both, if there are registers for them.
    pub(super) of_keys: bool,
    pub(super) of_values: bool,
    pub(super) products: MmaKind,
}

impl Backward {
    /// Rows of a cube.
    pub(super) fn rows(&self) -> usize {
        16 * self.planes
    }

    pub(super) fn units(&self) -> usize {
        32 * self.planes
    }

    /// Elements of the cube's own rows.
    pub(super) fn own(&self) -> usize {
        self.rows() * (row_len(self.d) + row_len(self.d_v))
    }

    /// Elements of a pair of tiles that come by. There are two pairs: one comes while the other is
    /// multiplied.
    pub(super) fn stage(&self) -> usize {
        self.tile * (row_len(self.d) + row_len(self.d_v))
    }

    /// Elements in shared memory.
    pub(super) fn shared(&self) -> usize {
        self.own() + 2 * self.stage()
    }
}
