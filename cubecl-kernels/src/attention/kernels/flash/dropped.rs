//! Dropout of probabilities. The random numbers are generated where they are used, see
//! [`AttentionDropout`](crate::AttentionDropout).

use cubecl::prelude::*;

use crate::kernel_parts::{RandomStream, random_bits, unit};

/// How dropout factors are generated; a compile-time constant of a kernel.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(in crate::attention) enum Dropped {
    /// No dropout.
    No,
    /// A query's probabilities for an even key and the key after it share a block of random
    /// numbers.
    Pairs,
    /// Each probability generates its own block.
    Each,
}

/// The random numbers of probabilities `[b, hq, s_q, s_k]`, which may be a slice of a global
/// tensor.
#[derive(CubeType, CubeLaunch)]
pub(in crate::attention) struct Dropout {
    pub(in crate::attention) random: RandomStream,
    /// The index of the first element's random number.
    pub(in crate::attention) first: u64,
    /// The stride of the indices from one row of the batch to the next.
    pub(in crate::attention) by_row: u64,
    pub(in crate::attention) by_head: u64,
    pub(in crate::attention) by_query: u64,
    pub(in crate::attention) p: f32,
    /// The factor of probabilities that are kept.
    pub(in crate::attention) kept: f32,
}

/// The dropout factors of query `i` for keys `j` and `j + 1`, where `j` is even.
#[cube]
pub(super) fn factors_of_keys(
    dropout: &Dropout,
    batch: u32,
    head: u32,
    i: u32,
    j: u32,
    #[comptime] dropped: Dropped,
) -> (f32, f32) {
    let number = number_of(dropout, batch, head, i) + j as u64;
    let mut one = f32::new(1.0);
    let mut other = f32::new(1.0);
    if comptime!(dropped == Dropped::Pairs) {
        let (a, b, c, d) = block_of(dropout, number);
        let second = number % 4u64 == 2u64;
        one = factor(dropout, select(second, c, a));
        other = factor(dropout, select(second, d, b));
    }
    if comptime!(dropped == Dropped::Each) {
        one = factor_of(dropout, number);
        other = factor_of(dropout, number + 1u64);
    }
    (one, other)
}

/// The dropout factors of queries `i` and `i + 1` for key `j`.
#[cube]
pub(super) fn factors_of_queries(
    dropout: &Dropout,
    batch: u32,
    head: u32,
    i: u32,
    j: u32,
    #[comptime] dropped: Dropped,
) -> (f32, f32) {
    let mut one = f32::new(1.0);
    let mut other = f32::new(1.0);
    if comptime!(dropped != Dropped::No) {
        let number = number_of(dropout, batch, head, i) + j as u64;
        one = factor_of(dropout, number);
        other = factor_of(dropout, number + dropout.by_query);
    }
    (one, other)
}

/// The index of query `i`'s first probability.
#[cube]
fn number_of(dropout: &Dropout, batch: u32, head: u32, i: u32) -> u64 {
    dropout.first
        + batch as u64 * dropout.by_row
        + head as u64 * dropout.by_head
        + i as u64 * dropout.by_query
}

#[cube]
fn block_of(dropout: &Dropout, number: u64) -> (u32, u32, u32, u32) {
    let block = number / 4u64;
    random_bits(&dropout.random, block as u32, (block >> 32u64) as u32)
}

#[cube]
fn factor_of(dropout: &Dropout, number: u64) -> f32 {
    let (a, b, c, d) = block_of(dropout, number);
    let lane = (number % 4u64) as u32;
    let low = select(lane == 0, a, b);
    let high = select(lane == 2, c, d);
    factor(dropout, select(lane < 2, low, high))
}

#[cube]
fn factor(dropout: &Dropout, bits: u32) -> f32 {
    let mut factor = dropout.kept;
    if unit(bits) < dropout.p {
        factor = f32::new(0.0);
    }
    factor
}
