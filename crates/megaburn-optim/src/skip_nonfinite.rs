//! Steps whose loss or gradients are not finite, or whose gradients are too large, change nothing. The
//! factor on the gradients becomes NaN, which the update takes as "do nothing"
//! ([`Optimizer::step`](crate::Optimizer::step); on GPUs the optimizers' kernels read the factor). The
//! gradients are tested by their norm, with the functions at the end of this file, when they are clipped.

use burn::Tensor;

use crate::{
    accumulator::GradientAccumulator,
    device_scalar::{DeviceScalar, Value},
    norm::GradNorm,
};

impl GradientAccumulator {
    /// Makes an update from these gradients do nothing if their `norm` is above `threshold`
    /// (Megatron-Core's `grad_norm_skip_threshold`).
    pub fn skip_above(&mut self, norm: &GradNorm, threshold: f64) {
        let limit = norm.square_of(threshold);
        match &norm.squares.value {
            Value::Known(squares) if *squares > f64::from(limit) => self.scale(f64::NAN),
            Value::Known(_) => {}
            Value::OnGpu(squares) => {
                let above = squares.clone().greater_elem(limit);
                self.scale_on_gpu(squares.ones_like().mask_fill(above, f32::NAN));
            }
        }
    }

    /// Makes an update from these gradients do nothing if `number`, e.g. the loss, is above `limit`.
    pub fn skip_if_above(&mut self, number: &DeviceScalar, limit: f32) {
        match &number.value {
            Value::Known(number) if *number > f64::from(limit) => self.scale(f64::NAN),
            Value::Known(_) => {}
            Value::OnGpu(number) => {
                let above = number.clone().greater_elem(limit);
                self.scale_on_gpu(number.ones_like().mask_fill(above, f32::NAN));
            }
        }
    }

    /// Makes an update from these gradients do nothing if `number`, e.g. the loss, is not finite.
    pub fn skip_if_not_finite(&mut self, number: &DeviceScalar) {
        match &number.value {
            Value::Known(number) if number.is_finite() => {}
            Value::Known(_) => self.scale(f64::NAN),
            Value::OnGpu(number) => self.scale_on_gpu(zero_or_nan(number).add_scalar(1.0)),
        }
    }
}

/// `factor` if `number` is finite, NaN otherwise.
pub(crate) fn unless_nonfinite(number: f64, factor: f64) -> f64 {
    if number.is_finite() { factor } else { f64::NAN }
}

/// `factor` if `number` is finite, NaN otherwise; the host does not wait for it.
pub(crate) fn unless_nonfinite_on_gpu(number: &Tensor<1>, factor: Tensor<1>) -> Tensor<1> {
    factor + zero_or_nan(number)
}

/// Zero if `number` is finite, NaN otherwise.
fn zero_or_nan(number: &Tensor<1>) -> Tensor<1> {
    number.clone().mul_scalar(0.0)
}
