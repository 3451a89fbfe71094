//! The choice of an attention kernel.

use burn::tensor::{DType, FloatDType};
use megaburn_kernels::AttentionKernel;
use megaburn_optim::Dtype;

use super::require::require;
use crate::error::TrainError;

/// The kernel that the choice `asked` comes to for a device, an element type and the head sizes
/// `[queries and keys, values]`.
///
/// # Errors
/// The requested kernel does not support them.
pub(super) fn resolved(
    asked: AttentionKernel,
    on_gpu: bool,
    dtype: Dtype,
    head_dims: [usize; 2],
) -> Result<AttentionKernel, TrainError> {
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
    let refused = asked != AttentionKernel::Auto && found != asked;
    require(!refused, "train.attention", asked, rule)?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(AttentionKernel::Auto, true, Dtype::Bf16, 64, AttentionKernel::Auto)]
    #[case(
        AttentionKernel::Auto,
        true,
        Dtype::F32,
        64,
        AttentionKernel::Reference
    )]
    #[case(
        AttentionKernel::Auto,
        false,
        Dtype::Bf16,
        64,
        AttentionKernel::Reference
    )]
    #[case(
        AttentionKernel::Reference,
        true,
        Dtype::Bf16,
        64,
        AttentionKernel::Reference
    )]
    #[case(
        AttentionKernel::Cubecl,
        true,
        Dtype::Bf16,
        64,
        AttentionKernel::Cubecl
    )]
    #[case(AttentionKernel::Cudnn, true, Dtype::Bf16, 64, AttentionKernel::Cudnn)]
    #[case(AttentionKernel::Cubecl, true, Dtype::F16, 64, AttentionKernel::Cubecl)]
    fn a_choice_comes_to(
        #[case] choice: AttentionKernel,
        #[case] on_gpu: bool,
        #[case] dtype: Dtype,
        #[case] head_dim: usize,
        #[case] expected: AttentionKernel,
    ) {
        assert_eq!(
            resolved(choice, on_gpu, dtype, [head_dim; 2]).unwrap(),
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
            (AttentionKernel::Cubecl, "cubecl"),
            (AttentionKernel::Cudnn, "cudnn"),
        ] {
            let error = resolved(choice, on_gpu, dtype, [head_dim; 2])
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
