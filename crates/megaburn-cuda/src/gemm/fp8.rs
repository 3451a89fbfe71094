//! Products of FP8 matrices. Each matrix has one scale, which stays on the device, and both are
//! stored with the dimension that is summed over as the contiguous one.
//!
//! That is the only form that cuBLASLt supports on Ada and Hopper GPUs: in its column-major terms
//! the first operand is transposed and the second is not ("TN").
//!
//! Sources: NVIDIA, cuBLAS 13.0, "8-bit Floating Point Data Types (FP8) Usage"; PyTorch's
//! `_scaled_mm` (`aten/src/ATen/native/cuda/ScaledBlas.cpp`).

use burn::{backend::DispatchDevice, prelude::Device, tensor::DType};
use burn_cubecl::tensor::CubeTensor;

use super::{
    element::Fp8Kind,
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

/// A matrix of FP8 numbers: its elements are `values * scale_inv`.
///
/// # Shapes
/// - `values`: `[rows, k]` in u8, the bytes of the numbers; rows are contiguous and begin at
///   multiples of 16 bytes
/// - `scale_inv`: `[1]` in f32
#[derive(Clone, Debug)]
pub struct Fp8Matrix {
    /// The FP8 numbers.
    pub values: CubeTensor,
    /// The factor of the whole matrix.
    pub scale_inv: CubeTensor,
    /// The format of `values`.
    pub kind: Fp8Kind,
}

/// How an [`fp8_product`] is rounded and computed.
#[derive(Clone, Copy, Debug)]
pub struct Fp8ProductOptions {
    /// The type of the result: bf16, f16 or f32.
    pub dtype: DType,
    /// See [`ProductOptions::tune`](super::ProductOptions::tune).
    pub tune: bool,
    /// Whether the tensor cores add up in their own registers, with about 14 bits of mantissa,
    /// instead of adding to f32 sums every few steps. This is faster and less exact; PyTorch and
    /// Transformer Engine use it for forward products only.
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
    let device = device.clone().inner();
    let DispatchDevice::Cube(gpu) = device.as_dispatch() else {
        return false;
    };
    let client = gpu.client();
    let architecture = &client.properties().identity.fingerprint;
    let capability = architecture.strip_prefix("ptx_sm");
    capability.is_some_and(|capability| capability.parse().is_ok_and(|number: u32| number >= 89))
}

/// Computes `a bᵀ` in new memory.
///
/// # Shapes
/// - `a`: `[m, k]`, `b`: `[n, k]`; `n` and `k` are multiples of 16, `m` is any number
/// - result: `[m, n]`
///
/// # Errors
/// The tensors are not on a CUDA device, both matrices are e5m2, `k` is 0, or types, sizes or strides
/// differ from those that [`Fp8Matrix`] describes. Later failures surface at
/// the next read of the result.
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
    let kinds = [a.kind, b.kind];
    let dtype = out.dtype;
    let describe = move || {
        let [of_a, of_b] = kinds.map(Fp8Kind::name);
        let [a, b] = [shapes[0].as_slice(), shapes[1].as_slice()];
        let dtype = dtype.name();
        format!("FP8 product of {a:?} {of_a} and {b:?} {of_b}, transposed, into {dtype}")
    };
    let refused = |why: &str| CudaError::Refused(format!("{}: {why}", describe()));
    let Some(queue) = CudaQueue::of(out) else {
        return Err(refused("they are not on a CUDA device"));
    };
    for of in [&a, &b] {
        check(of).map_err(|why| refused(&why))?;
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
    let key = Key::fp8(views, kinds, dtype, how.add, how.tokens, how.fast_accum)
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

/// Refuses tensors that are not an FP8 matrix.
fn check(of: &Fp8Matrix) -> Result<(), String> {
    let Fp8Matrix {
        values, scale_inv, ..
    } = of;
    let [shape, scale] = [values, scale_inv].map(|x| x.meta.shape().as_slice());
    if values.dtype != DType::U8 || shape.len() != 2 {
        let dtype = values.dtype.name();
        return Err(format!(
            "FP8 numbers are a matrix of u8, not {shape:?} {dtype}"
        ));
    }
    if scale_inv.dtype != DType::F32 || scale_inv.meta.num_elements() != 1 {
        let dtype = scale_inv.dtype.name();
        return Err(format!(
            "the scale of a matrix is one f32, not {scale:?} {dtype}"
        ));
    }
    Ok(())
}
