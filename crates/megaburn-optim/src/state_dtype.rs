use burn::tensor::FloatDType;

use crate::error::OptimError;

/// Refuses types in which gradients and optimizer state cannot be stored.
pub(crate) fn check_dtype(name: &'static str, dtype: FloatDType) -> Result<(), OptimError> {
    match dtype {
        FloatDType::F32 | FloatDType::BF16 => Ok(()),
        dtype => Err(OptimError::BadStateDtype { name, dtype }),
    }
}
