//! Lists that cover each pair of values; the full product on demand.

use std::env;

/// Set to any value, this variable runs the full products.
const VARIABLE: &str = "MEGABURN_FULL_PRODUCTS";

/// The values of one more setting for the cell `cell` of a table of two others: one of them, in
/// turn, so that a table whose neighbouring cells differ by 1 covers each pair of values; all of
/// them with `MEGABURN_FULL_PRODUCTS` set.
pub fn pairwise<T: Copy, const N: usize>(values: [T; N], cell: usize) -> Vec<T> {
    match env::var_os(VARIABLE) {
        Some(_) => values.to_vec(),
        None => vec![values[cell % N]],
    }
}
