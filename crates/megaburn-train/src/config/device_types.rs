//! What a device must be able to compute with.

use burn::{prelude::Device, tensor::FloatDType};
use megaburn_kernels::can_quantize;
use megaburn_optim::Dtype;

use super::{TrainConfig, require::require};
use crate::error::TrainError;

impl TrainConfig {
    /// Refuses a device that cannot compute in the element type of the run, or cannot quantise.
    ///
    /// # Errors
    /// The device has no `train.dtype`; or a phase quantises, and the device is a GPU without the
    /// instructions.
    pub(crate) fn check_device(&self, device: &Device) -> Result<(), TrainError> {
        let dtype = self.train.dtype;
        check_dtype(dtype, device.supports_dtype(FloatDType::from(dtype)))?;
        self.check_quantizing(can_quantize(device))
    }
}

fn check_dtype(dtype: Dtype, is_supported: bool) -> Result<(), TrainError> {
    let rule = format!("\"f32\" on this device, whose backend cannot compute in {dtype}");
    require(is_supported, "train.dtype", dtype, rule)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_without_the_type_is_refused_with_the_type_to_use() {
        for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
            assert!(Device::flex().supports_dtype(FloatDType::from(dtype)));
            check_dtype(dtype, true).unwrap();
        }
        let error = check_dtype(Dtype::Bf16, false).unwrap_err().to_string();
        assert_eq!(
            error,
            "`train.dtype` is bf16: it must be \"f32\" on this device, whose backend cannot compute \
             in bf16"
        );
    }
}
