use crate::error::KernelError;

/// The positions of packed sequences: they restart at 0 in each document. `cu_seqlens` has a
/// leading 0 and then the end of each document, as in Megatron and FlashAttention. If its last
/// element is the length of the sequence, padding after the documents gets positions too.
///
/// ```
/// use megaburn_kernels::packed_positions;
///
/// assert_eq!(packed_positions(&[0, 3, 5])?, [0, 1, 2, 0, 1]);
/// # Ok::<(), megaburn_kernels::KernelError>(())
/// ```
///
/// # Errors
/// If the list does not begin with 0, or is not ascending.
pub fn packed_positions(cu_seqlens: &[usize]) -> Result<Vec<usize>, KernelError> {
    if cu_seqlens.first() != Some(&0) || !cu_seqlens.is_sorted() {
        return Err(KernelError::PackedLengths {
            cu_seqlens: cu_seqlens.to_vec(),
        });
    }
    Ok(cu_seqlens
        .windows(2)
        .flat_map(|ends| 0..ends[1] - ends[0])
        .collect())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[test]
    fn positions_begin_anew_in_each_document() {
        assert_eq!(packed_positions(&[0, 2, 2, 6]).unwrap(), [0, 1, 0, 1, 2, 3]);
        assert!(packed_positions(&[0]).unwrap().is_empty());
    }

    #[rstest]
    #[case(&[])]
    #[case(&[1, 3])]
    #[case(&[0, 4, 3])]
    fn ends_that_descend_or_do_not_begin_with_0_are_refused(#[case] cu_seqlens: &[usize]) {
        let error = packed_positions(cu_seqlens).unwrap_err().to_string();
        assert!(error.contains(&format!("{cu_seqlens:?}")), "{error}");
    }
}
