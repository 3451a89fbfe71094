//! Checks that operations make on their tensors before they launch anything: supported dtypes, and
//! one device for all.

use burn::tensor::{Bool, DType, Device, Int, Tensor};

/// The float dtypes that most operations compute with.
const FLOATS: &[DType] = &[DType::F64, DType::F32, DType::BF16, DType::F16];
/// The dtypes of tokens and labels. They are signed, since they are compared with negative numbers.
const INTS: &[DType] = &[DType::I64, DType::I32];

/// What the checks need to know of a tensor: everything but its elements.
#[derive(Clone, Debug)]
pub struct ArgCheck {
    name: &'static str,
    dtype: DType,
    /// The supported dtypes; empty allows any.
    allowed: &'static [DType],
    device: Device,
}

impl ArgCheck {
    /// Replaces the supported dtypes.
    pub fn of(self, allowed: &'static [DType]) -> Self {
        Self { allowed, ..self }
    }
}

/// A float operand, of any dtype that most operations compute with.
pub fn float<const D: usize>(name: &'static str, x: &Tensor<D>) -> ArgCheck {
    ArgCheck {
        name,
        dtype: x.dtype(),
        allowed: FLOATS,
        device: x.device(),
    }
}

/// An operand of tokens or labels.
pub fn int<const D: usize>(name: &'static str, x: &Tensor<D, Int>) -> ArgCheck {
    ArgCheck {
        name,
        dtype: x.dtype(),
        allowed: INTS,
        device: x.device(),
    }
}

/// An operand of truth values.
pub fn bool<const D: usize>(name: &'static str, x: &Tensor<D, Bool>) -> ArgCheck {
    ArgCheck {
        name,
        dtype: x.dtype(),
        allowed: &[],
        device: x.device(),
    }
}

/// Panics unless every operand has one of its supported dtypes and all are on one device. Some
/// operands may be tracked by autodiff and others not; those are constants.
pub fn check(op: &str, operands: impl IntoIterator<Item = ArgCheck>) {
    let mut first: Option<ArgCheck> = None;
    for operand in operands {
        let ArgCheck {
            name,
            dtype,
            allowed,
            ref device,
        } = operand;
        assert!(
            allowed.is_empty() || allowed.contains(&dtype),
            "{op}: {name} is {}, not {}: cast or dequantize it first",
            dtype.name(),
            allowed
                .iter()
                .map(DType::name)
                .collect::<Vec<_>>()
                .join(" or ")
        );
        if let Some(first) = &first {
            let other = first.name;
            let there = &first.device;
            assert!(
                there == device,
                "{op}: {other} is on {there:?} but {name} on {device:?}: move one of them"
            );
        }
        first.get_or_insert(operand);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_refused, constant, device, quantized};

    #[test]
    fn a_dtype_that_nothing_computes_with_is_refused() {
        let x = || float("x", &constant([2]));
        check("op", [x(), x().of(&[DType::F32])]);
        assert_refused(
            || {
                check(
                    "op",
                    [float("x", &constant([2])), float("y", &quantized([2, 4]))],
                )
            },
            "op: y is qfloat, not f64 or f32 or bf16 or f16: cast or dequantize it first",
        );
        assert_refused(
            || {
                check(
                    "op",
                    [float("x", &constant([2]).cast(DType::F64)).of(&[DType::F32])],
                )
            },
            "op: x is f64, not f32: cast",
        );
        let ids = Tensor::<1, Int>::from_data([1, 2], &device()).cast(DType::U8);
        check("op", [int("ids", &ids.clone().cast(DType::I32))]);
        assert_refused(
            || check("op", [int("ids", &ids)]),
            "op: ids is u8, not i64 or i32",
        );
    }

    #[test]
    fn operands_may_be_differentiated_or_not() {
        let x = constant([2]);
        check("op", [float("x", &x), float("y", &x.clone().inner())]);
    }
}
