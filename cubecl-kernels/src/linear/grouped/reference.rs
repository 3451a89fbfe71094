use burn::tensor::Tensor;

use super::rows::{part, row_ranges};
use crate::linear::{LinearOptions, linear};

/// [`grouped_linear`](crate::grouped_linear) by its definition: [`linear`] of each range by itself.
pub(super) fn grouped_linear(x: Tensor<2>, rows: &[usize], weights: &[Tensor<2>]) -> Tensor<2> {
    let row_ranges = row_ranges(rows).into_iter().zip(weights);
    let some = row_ranges.filter(|(rows, _)| !rows.is_empty());
    let parts =
        some.map(|(rows, w)| linear(part(&x, &rows), w.clone(), None, LinearOptions::default()));
    Tensor::cat(parts.collect(), 0)
}
