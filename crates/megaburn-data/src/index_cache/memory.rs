use crate::error::DataError;

/// An empty vector with memory for `count` elements.
///
/// # Errors
/// There is not enough memory.
pub(crate) fn reserved<T>(count: u64) -> Result<Vec<T>, DataError> {
    let mut elements = Vec::new();
    let reserved = usize::try_from(count).map(|count| elements.try_reserve_exact(count));
    match reserved {
        Ok(Ok(())) => Ok(elements),
        _ => Err(DataError::OrderSize {
            why: format!(
                "{} bytes of memory are needed for an index, and are not available; divide the \
                 data set, or ask for fewer samples",
                u128::from(count) * size_of::<T>() as u128
            ),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_no_machine_has_is_an_error() {
        let error = reserved::<i32>(u64::MAX / 8).unwrap_err().to_string();
        assert!(
            error.contains("9223372036854775804 bytes of memory"),
            "{error}"
        );
    }
}
