//! The gradients, with scores and probabilities made anew: `P = exp(S - lse)`,
//! `dS = P * (dO V^T - delta)`, `dV = P^T dO`, `dK = dS^T Q * scale`, `dQ = dS K * scale`.
//!
//! Source: Dao, FlashAttention-2 (2023), <https://arxiv.org/abs/2307.08691>, algorithm 2; the sums
//! over keys and those over queries are two kernels here, so that each sum has one order and one
//! owner: no atomics, the same bits each time. A plane has 16 rows, keys in the one and queries in
//! the other; scores have that orientation, and pass from one product to the next in registers.

use cubecl::prelude::*;

use super::tile::{exp2, row_len};
use super::visible::Mask;

/// Planes of a cube; each has 16 rows.
pub(super) const PLANES: usize = 4;
/// Rows of a cube.
pub(super) const ROWS: usize = 16 * PLANES;
pub(super) const UNITS: usize = 32 * PLANES;

/// The shape of the work of a cube.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(super) struct Backward {
    pub(super) d: usize,
    pub(super) d_v: usize,
    /// Rows of the tiles that come by: queries where the cube has keys, keys where it has queries.
    pub(super) tile: usize,
    pub(super) mask: Mask,
    /// Which gradients of keys and of values: both, if there are registers for them.
    pub(super) of_keys: bool,
    pub(super) of_values: bool,
}

impl Backward {
    /// Elements of the cube's own rows.
    pub(super) fn own(&self) -> usize {
        ROWS * (row_len(self.d) + row_len(self.d_v))
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

/// A row's `log2` of the sum of exponentials, plus infinity for a row without a key: no probability
/// of it is other than zero.
#[cube]
pub(super) fn in_base_2(lse: f32) -> f32 {
    let mut found = lse * f32::new(core::f32::consts::LOG2_E);
    if lse == f32::new(f32::NEG_INFINITY) {
        found = f32::new(f32::INFINITY);
    }
    found
}

/// `P` and `dS` of one element: written over the score and the product `dO V^T`.
#[cube]
pub(super) fn probability(
    score: f32,
    dp: f32,
    lse: f32,
    delta: f32,
    scale: f32,
    seen: bool,
) -> (f32, f32) {
    let mut p = exp2(score * scale - lse);
    if !seen {
        p = f32::new(0.0);
    }
    (p, p * (dp - delta))
}
