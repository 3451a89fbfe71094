//! Errors of `parallelize`.

use crate::error::ParallelError;

/// The error of a layer or pattern.
pub(super) fn refuse<T>(name: &str, why: String) -> Result<T, ParallelError> {
    Err(ParallelError::Config {
        layer: "parallelize",
        name: name.into(),
        why,
    })
}
