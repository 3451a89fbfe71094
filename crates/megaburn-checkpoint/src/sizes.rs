//! Checks sizes from a file before anything is computed from them.

/// Number of elements of a tensor of this shape, or `None` if that number, or their number of
/// bytes, would overflow. If a dimension is 0, the others are still checked, because their product
/// is the length of a row.
pub(crate) fn num_elements(shape: &[usize]) -> Option<usize> {
    let most = shape
        .iter()
        .try_fold(1usize, |product, &len| product.checked_mul(len.max(1)))?;
    // Elements have up to 8 bytes; the other factor of 2 leaves space for sums.
    (most <= usize::MAX >> 4).then(|| if shape.contains(&0) { 0 } else { most })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_beyond_counting_has_no_number_of_elements() {
        assert_eq!(num_elements(&[]), Some(1));
        assert_eq!(num_elements(&[3, 4]), Some(12));
        assert_eq!(num_elements(&[0, 4]), Some(0));
        assert_eq!(num_elements(&[1 << 59]), Some(1 << 59));
        for shape in [&[1 << 60][..], &[1 << 40, 1 << 40], &[0, 1 << 40, 1 << 40]] {
            assert_eq!(num_elements(shape), None, "{shape:?}");
        }
    }
}
