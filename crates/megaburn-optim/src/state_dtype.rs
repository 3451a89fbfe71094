use std::fmt;

use burn::tensor::FloatDType;
use megaburn_kernels::{FP8_MOMENT_BLOCK, Fp8Moment};
use schemars::{JsonSchema, Schema};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{dtype::name_aliases, error::OptimError, moment::Moment};

/// The element type in which moments are stored. Updates are computed in f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(JsonSchema)]
#[schemars(transform = add_aliases)]
pub enum StateDtype {
    /// Single precision.
    #[default]
    #[serde(alias = "float32")]
    F32,
    /// 8 bits of mantissa. A step changes a mean only by more than 1/512 of itself.
    #[serde(alias = "bfloat16")]
    Bf16,
    /// e4m3 numbers of 8 bits with a scale for each 128 elements, of a mean of squares its root.
    /// Rounding is stochastic, so that small changes are not lost on average.
    Fp8,
}

/// Adds the aliases of the names, which schemars leaves out.
fn add_aliases(schema: &mut Schema) {
    let names = schema.get_mut("oneOf").and_then(Value::as_array_mut);
    let names = names.expect("a choice with descriptions");
    names.extend(name_aliases([("float32", "f32"), ("bfloat16", "bf16")]));
}

impl StateDtype {
    /// Bytes of a moment per element.
    pub fn bytes_of_element(self) -> f64 {
        match self {
            Self::F32 => 4.0,
            Self::Bf16 => 2.0,
            // A block has a scale of two bytes.
            Self::Fp8 => 1.0 + 2.0 / FP8_MOMENT_BLOCK as f64,
        }
    }

    /// The type of the tensors that updates read and write.
    pub(crate) fn computed(self) -> FloatDType {
        match self {
            Self::F32 | Self::Fp8 => FloatDType::F32,
            Self::Bf16 => FloatDType::BF16,
        }
    }

    /// How a moment is coded in 8 bits; `None` in the other types.
    pub(crate) fn code(self, moment: Moment) -> Option<Fp8Moment> {
        match (self, moment) {
            (Self::F32 | Self::Bf16, _) => None,
            (Self::Fp8, Moment::ExpAvgSq) => Some(Fp8Moment::Root),
            (Self::Fp8, Moment::ExpAvg | Moment::MomentumBuffer) => Some(Fp8Moment::Plain),
        }
    }
}

impl fmt::Display for StateDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
        })
    }
}

/// Refuses types in which gradients and parameters cannot be kept.
pub(crate) fn check_dtype(name: &'static str, dtype: FloatDType) -> Result<(), OptimError> {
    match dtype {
        FloatDType::F32 | FloatDType::BF16 => Ok(()),
        dtype => Err(OptimError::BadStateDtype { name, dtype }),
    }
}
