use burn::tensor::{DType, FloatDType};
use megaburn_kernels::AttentionKernel;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Dtype, rules::require};
use crate::TrainError;

/// Which kernels compute attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(JsonSchema)]
pub enum AttentionName {
    /// On GPUs, cuDNN for sequences of 1024 tokens and more where it is installed, the fused kernel
    /// otherwise, and composed operations where neither supports the type or the head size. The
    /// start of a run prints the choice.
    #[default]
    Auto,
    /// The fused kernel: on GPUs, in bf16 or f16, with head sizes that are multiples of 8 up to
    /// 256.
    Cubecl,
    /// cuDNN's engines, where cuDNN 9 is installed: the same limits as `cubecl`, but not
    /// deterministic.
    Cudnn,
    /// Composed tensor operations.
    Reference,
}

impl From<AttentionName> for AttentionKernel {
    fn from(attention: AttentionName) -> Self {
        match attention {
            AttentionName::Auto => Self::Auto,
            AttentionName::Cubecl => Self::Cubecl,
            AttentionName::Cudnn => Self::Cudnn,
            AttentionName::Reference => Self::Reference,
        }
    }
}

impl AttentionName {
    /// The kernel that this choice selects for a device, an element type and the head sizes
    /// `[queries and keys, values]`.
    ///
    /// # Errors
    /// The requested kernel does not support them.
    pub(crate) fn resolved(
        self,
        on_gpu: bool,
        dtype: Dtype,
        head_dims: [usize; 2],
    ) -> Result<AttentionKernel, TrainError> {
        let asked = AttentionKernel::from(self);
        let found = if on_gpu {
            asked.resolved(DType::from(FloatDType::from(dtype)), &head_dims)
        } else {
            AttentionKernel::Reference
        };
        let device = if on_gpu { "GPU" } else { "CPU" };
        let [keys, values] = head_dims.map(|size| size.to_string());
        let heads = if keys == values {
            keys
        } else {
            format!("{keys} (values {values})")
        };
        let rule = format!(
            "\"auto\" or \"reference\" here: the kernel needs a GPU, train.dtype \"bf16\" or \
            \"f16\" and head sizes that are multiples of 8 up to 256, but the device is a \
            {device}, the dtype \"{dtype}\" and the head size {heads}"
        );
        let refused = self != Self::Auto && found != asked;
        require(!refused, "train.attention", asked, rule)?;
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(AttentionName::Auto, true, Dtype::Bf16, 64, AttentionKernel::Auto)]
    #[case(AttentionName::Auto, true, Dtype::F32, 64, AttentionKernel::Reference)]
    #[case(
        AttentionName::Auto,
        false,
        Dtype::Bf16,
        64,
        AttentionKernel::Reference
    )]
    #[case(
        AttentionName::Reference,
        true,
        Dtype::Bf16,
        64,
        AttentionKernel::Reference
    )]
    #[case(AttentionName::Cubecl, true, Dtype::Bf16, 64, AttentionKernel::Cubecl)]
    #[case(AttentionName::Cudnn, true, Dtype::Bf16, 64, AttentionKernel::Cudnn)]
    #[case(AttentionName::Cubecl, true, Dtype::F16, 64, AttentionKernel::Cubecl)]
    fn a_choice_comes_to(
        #[case] choice: AttentionName,
        #[case] on_gpu: bool,
        #[case] dtype: Dtype,
        #[case] head_dim: usize,
        #[case] expected: AttentionKernel,
    ) {
        assert_eq!(
            choice.resolved(on_gpu, dtype, [head_dim; 2]).unwrap(),
            expected
        );
    }

    #[rstest]
    #[case(false, Dtype::Bf16, 64, "the device is a CPU")]
    #[case(true, Dtype::F32, 64, "\"f32\"")]
    #[case(true, Dtype::Bf16, 100, "the head size 100")]
    fn a_kernel_that_cannot_is_refused(
        #[case] on_gpu: bool,
        #[case] dtype: Dtype,
        #[case] head_dim: usize,
        #[case] expected: &str,
    ) {
        for (choice, name) in [
            (AttentionName::Cubecl, "cubecl"),
            (AttentionName::Cudnn, "cudnn"),
        ] {
            let error = choice
                .resolved(on_gpu, dtype, [head_dim; 2])
                .unwrap_err()
                .to_string();
            assert!(
                error.contains("train.attention") && error.contains(expected),
                "{error}"
            );
            assert!(error.contains(name), "{error}");
        }
    }
}
