//! The gradients, with recomputed scores and probabilities: `P = exp(S - lse)`,
//! `dS = P * (dO V^T - delta)`, `dV = P^T dO`, `dK = dS^T Q * scale`, `dQ = dS K * scale`.
//!
//! Source: Dao, FlashAttention-2 (2023), <https://arxiv.org/abs/2307.08691>, algorithm 2. Here the
//! sums over keys and the sums over queries are two kernels, so that each sum has one order and one
//! owner: there are no atomics, and the bits are the same in every run. A plane has 16 rows, keys
//! in one kernel and queries in the other; scores have that orientation, and stay in registers from
//! one product to the next.

use super::dropped::Dropped;
use super::products::MmaKind;
use super::tile::row_len;
use super::visible::Mask;

/// The shape of a cube's work.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(super) struct Backward {
    pub(super) d: usize,
    pub(super) d_v: usize,
    /// Planes of a cube; each has 16 rows.
    pub(super) planes: usize,
    /// Rows of the tiles that a cube loops over: queries where the cube has keys, keys where it has
    /// queries.
    pub(super) tile: usize,
    pub(super) mask: Mask,
    /// Whether scores are soft-capped.
    pub(super) capped: bool,
    pub(super) dropped: Dropped,
    /// Whether the kernel computes the gradients of keys, and of values: both in one kernel if
    /// there are enough registers, neither in the kernel of queries.
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

    /// Elements of a pair of tiles in the loop. Shared memory has two pairs: one is loaded while
    /// the other is multiplied.
    pub(super) fn stage(&self) -> usize {
        self.tile * (row_len(self.d) + row_len(self.d_v))
    }

    /// Elements in shared memory.
    pub(super) fn shared(&self) -> usize {
        self.own() + 2 * self.stage()
    }
}
