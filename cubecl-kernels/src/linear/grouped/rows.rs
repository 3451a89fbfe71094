//! The ranges of rows, one for each matrix.

use std::ops::Range;

use burn::tensor::Tensor;

/// The rows of one range.
pub(super) fn part(x: &Tensor<2>, slice_of: &Range<usize>) -> Tensor<2> {
    match slice_of.is_empty() {
        // Backends may reject an empty slice.
        true => Tensor::empty([0, x.dims()[1]], (&x.device(), x.dtype())),
        false => x.clone().narrow(0, slice_of.start, slice_of.len()),
    }
}

/// The ranges that follow each other, of these numbers of rows.
pub(super) fn row_ranges(rows: &[usize]) -> Vec<Range<usize>> {
    let ends = rows.iter().scan(0, |end, rows| {
        *end += rows;
        Some(*end)
    });
    ends.zip(rows).map(|(end, rows)| end - rows..end).collect()
}
