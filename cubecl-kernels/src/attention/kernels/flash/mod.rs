//! Attention on tensor cores without scores in memory, for bf16 and f16 on NVIDIA GPUs.
//!
//! In CubeCL's terms a unit is a thread, a plane is a warp, and a cube is a block.
//!
//! Backward computes the gradients with recomputed scores and probabilities: `P = exp(S - lse)`,
//! `dS = P * (dO V^T - delta)`, `dV = P^T dO`, `dK = dS^T Q * scale`, `dQ = dS K * scale`.
//!
//! Source: Dao, FlashAttention-2 (2023), <https://arxiv.org/abs/2307.08691>, algorithm 2. Here the
//! sums over keys and the sums over queries are two kernels, so that each sum has one order and one
//! owner: there are no atomics, and the bits are the same in every run. A plane has 16 rows, keys
//! in one kernel and queries in the other; scores have that orientation, and stay in registers from
//! one product to the next. The sums over the batch, which the gradient of a bias needs, are a third
//! kernel.

mod backward_bias;
mod backward_keys;
mod backward_queries;
mod cube_shape;
mod delta;
mod diagonals;
mod dropped;
mod forward;
mod products;
mod score;
mod softmax;
mod tile;
pub(in crate::attention) mod visible;
pub(in crate::attention) mod wgmma;

pub(in crate::attention) use backward_bias::flash_backward_bias;
pub(in crate::attention) use backward_keys::flash_backward_keys;
pub(in crate::attention) use backward_queries::flash_backward_queries;
pub(in crate::attention) use cube_shape::{Backward, Forward};
pub(in crate::attention) use delta::flash_delta;
pub(in crate::attention) use diagonals::{DIAGONAL_ROWS, sum_diagonals};
pub(in crate::attention) use dropped::{Dropout, DropoutLaunch, Dropped};
pub(in crate::attention) use forward::flash_forward;
pub(in crate::attention) use products::MmaKind;
pub(in crate::attention) use score::{Scale, ScaleLaunch};
pub(in crate::attention) use tile::{RowsLaunch, row_len};
