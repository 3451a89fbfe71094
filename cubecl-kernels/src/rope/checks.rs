//! Checks of the parameters of frequencies.

use crate::error::KernelError;

/// Checks that a number is finite and greater than `above`.
pub(super) fn check(name: &'static str, value: f64, above: f64) -> Result<(), KernelError> {
    if value.is_finite() && value > above {
        Ok(())
    } else {
        Err(KernelError::RopeParameter { name, value, above })
    }
}
