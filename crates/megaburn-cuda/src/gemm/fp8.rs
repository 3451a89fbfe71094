//! Products of FP8 matrices. Scales stay on the device, and both matrices are stored with the
//! dimension that is summed over as the contiguous one.
//!
//! That is the only form that cuBLASLt supports on Ada and Hopper GPUs: in its column-major terms
//! the first operand is transposed and the second is not ("TN").
//!
//! Sources: NVIDIA, cuBLAS 13.0, "8-bit Floating Point Data Types (FP8) Usage"; PyTorch's
//! `_scaled_mm` (`aten/src/ATen/native/cuda/ScaledBlas.cpp`).

use burn::{backend::DispatchDevice, prelude::Device, tensor::DType};
use burn_cubecl::tensor::CubeTensor;

use super::{
    fp8_matrix::Fp8Matrix,
    key::{Key, Tokens},
    library,
    options::{self, GemmOptions},
    plan::{Factors, Operands},
};
use crate::{
    error::CudaError,
    queue::{CudaQueue, Op},
    tensor::{MatrixView, empty},
};

/// How an [`fp8_product`] is rounded and computed.
#[derive(Clone, Copy, Debug)]
pub struct Fp8ProductOptions {
    /// The type of the result: bf16, f16 or f32.
    pub dtype: DType,
    /// See [`ProductOptions::tune`](super::ProductOptions::tune).
    pub tune: bool,
    /// Whether the tensor cores add up in their own registers, with about 14 bits of mantissa,
    /// instead of adding to f32 sums every few steps. This is faster and less exact; PyTorch and
    /// Transformer Engine use it for forward products only. Matrices with several scales are added
    /// up in f32, whatever is asked for.
    pub fast_accum: bool,
    /// Whether tokens are summed over, as in weight gradients, and are not the rows of the result.
    /// Products that differ only in their number of tokens share algorithms.
    pub sums_tokens: bool,
}

/// What [`fp8_product_into`] does with the matrix that it writes to, and how it is computed.
#[derive(Clone, Copy, Debug)]
pub struct Fp8IntoOptions {
    /// Whether the product is added to the matrix instead of replacing it.
    pub add: bool,
    /// See [`ProductOptions::tune`](super::ProductOptions::tune).
    pub tune: bool,
    /// See [`Fp8ProductOptions::fast_accum`].
    pub fast_accum: bool,
    /// See [`Fp8ProductOptions::sums_tokens`].
    pub sums_tokens: bool,
}

/// Whether a device's tensor cores multiply FP8 matrices: an NVIDIA GPU of compute capability 8.9
/// or higher.
pub fn takes_fp8(device: &Device) -> bool {
    compute_capability(device).is_some_and(|capability| capability >= 89)
}

/// Whether cuBLASLt multiplies FP8 matrices with several scales each on a device: GPUs of compute
/// capability 9.0 (Hopper).
pub fn takes_fp8_blocks(device: &Device) -> bool {
    compute_capability(device) == Some(90)
}

/// The compute capability of an NVIDIA GPU, times ten.
fn compute_capability(device: &Device) -> Option<u32> {
    let device = device.clone().inner();
    let DispatchDevice::Cube(gpu) = device.as_dispatch() else {
        return None;
    };
    let client = gpu.client();
    let architecture = &client.properties().identity.fingerprint;
    architecture.strip_prefix("ptx_sm")?.parse().ok()
}

/// Computes `a bᵀ` in new memory.
///
/// # Shapes
/// - `a`: `[m, k]`, `b`: `[n, k]`; `n` and `k` are multiples of 16, `m` is any number
/// - result: `[m, n]`
///
/// # Errors
/// The tensors are not on a CUDA device, both matrices are e5m2 or have scales of blocks, only one
/// has one scale, `k` is 0, or types, sizes or strides differ from those that [`Fp8Matrix`] describes.
/// Later failures surface at the next read of the result.
pub fn fp8_product(
    a: Fp8Matrix,
    b: Fp8Matrix,
    options: Fp8ProductOptions,
) -> Result<CubeTensor, CudaError> {
    let Fp8ProductOptions {
        dtype,
        tune,
        fast_accum,
        sums_tokens,
    } = options;
    let [m, n] = [&a, &b].map(|of| of.values.meta.shape().first().copied().unwrap_or(0));
    let out = empty(&a.values, [m, n], dtype);
    let how = How {
        add: false,
        tune,
        fast_accum,
        tokens: tokens(sums_tokens),
    };
    multiply(a, b, &out, how)?;
    Ok(out)
}

/// Computes `into = a bᵀ` or `into += a bᵀ`, in place. The caller must ensure that `into` is not
/// read concurrently.
///
/// # Shapes
/// See [`fp8_product`]; `into`: `[m, n]` in f32, bf16 or f16, with contiguous rows that begin at
/// multiples of 16 bytes.
///
/// # Errors
/// See [`fp8_product`].
pub fn fp8_product_into(
    a: Fp8Matrix,
    b: Fp8Matrix,
    into: &CubeTensor,
    options: Fp8IntoOptions,
) -> Result<(), CudaError> {
    let Fp8IntoOptions {
        add,
        tune,
        fast_accum,
        sums_tokens,
    } = options;
    let how = How {
        add,
        tune,
        fast_accum,
        tokens: tokens(sums_tokens),
    };
    multiply(a, b, into, how)
}

fn tokens(are_summed: bool) -> Tokens {
    if are_summed {
        Tokens::Inner
    } else {
        Tokens::Rows
    }
}

/// How a product is computed.
#[derive(Clone, Copy, Debug)]
struct How {
    add: bool,
    tune: bool,
    fast_accum: bool,
    tokens: Tokens,
}

fn multiply(a: Fp8Matrix, b: Fp8Matrix, out: &CubeTensor, how: How) -> Result<(), CudaError> {
    let shapes = [&a, &b].map(|of| of.values.meta.shape().clone());
    let operands = [&a, &b].map(|of| (of.kind, of.scaling));
    let dtype = out.dtype;
    let describe = move || {
        let [of_a, of_b] = operands.map(|(kind, _)| kind.name());
        let [a, b] = [shapes[0].as_slice(), shapes[1].as_slice()];
        let dtype = dtype.name();
        format!("FP8 product of {a:?} {of_a} and {b:?} {of_b}, transposed, into {dtype}")
    };
    let refused = |why: &str| CudaError::Refused(format!("{}: {why}", describe()));
    let Some(queue) = CudaQueue::of(out) else {
        return Err(refused("they are not on a CUDA device"));
    };
    for of in [&a, &b] {
        of.check().map_err(|why| refused(&why))?;
    }
    if out.meta.shape().num_elements() == 0 {
        return Ok(());
    }
    let view = |x: &CubeTensor| {
        MatrixView::new(x.meta.shape(), x.meta.strides())
            .ok_or_else(|| refused("matrices must have at least one column, and contiguous rows"))
    };
    let views = [view(&a.values)?, view(&b.values)?.swapped(), view(out)?];
    if views[2].transposed {
        return Err(refused("the rows of the result must be contiguous"));
    }
    let key = Key::fp8(views, operands, dtype, how.add, how.tokens, how.fast_accum)
        .map_err(|why| refused(&why))?;
    let GemmOptions { tune, tuning, .. } = options::options(&queue);
    let tune = tune && how.tune;
    let factors = Factors {
        alpha: 1.0,
        beta: f32::from(u8::from(how.add)),
    };
    let op = Op::new(describe)
        .reads(&a.values)
        .reads(&b.values)
        .reads(&a.scale_inv)
        .reads(&b.scale_inv)
        .writes(out);
    queue.enqueue(op, move |stream, buffers| {
        let operands = Operands {
            a: buffers.reads[0],
            b: buffers.reads[1],
            out: buffers.writes[0],
            bias: None,
            scales: Some([buffers.reads[2], buffers.reads[3]]),
        };
        library::run(&key, stream, operands, factors, (tune, tuning))
    });
    Ok(())
}
