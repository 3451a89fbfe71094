//! Matrix products through cuBLASLt: bf16, f16 and f32 inputs, fp32 accumulation, strided operands
//! without copies (transposed, sliced, pitched, batched), optional accumulation into the output.
//! [`fp8_product`] multiplies FP8 matrices, on GPUs that have such tensor cores.
//!
//! cuBLASLt is column-major. A row-major `[R, C]` is a column-major `[C, R]`, so `D = A B` is
//! requested as `Dᵀ = Bᵀ Aᵀ` by passing B first.

mod element;
mod fp8;
mod fp8_matrix;
mod key;
mod library;
mod options;
mod plan;
mod suggestions;
mod tune;
mod tuned;

use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;

use crate::{
    error::CudaError,
    queue::{CudaQueue, Op},
    tensor::{MatrixView, empty},
};
pub use element::Fp8Kind;
pub use fp8::{
    Fp8IntoOptions, Fp8ProductOptions, fp8_product, fp8_product_into, takes_fp8, takes_fp8_blocks,
};
pub use fp8_matrix::{FP8_BLOCK, Fp8Matrix, Fp8Scaling};
use key::Key;
pub use options::{GemmOptions, Tuning, set_options};
use plan::{Factors, Operands};

/// How a [`product`] is scaled, rounded and computed.
#[derive(Clone, Copy, Debug)]
pub struct ProductOptions {
    /// A factor of the product.
    pub scale: f32,
    /// The type of the result: that of the matrices or f32.
    pub dtype: DType,
    /// Whether the algorithm may be chosen by timing, if the [device's options](GemmOptions::tune)
    /// allow it. Otherwise it is cuBLASLt's first suggestion, so that equal matrices have bitwise
    /// equal products on every GPU of a kind.
    pub tune: bool,
}

/// What [`product_into`] does with the matrix that it writes to, and how it is computed.
#[derive(Clone, Copy, Debug)]
pub struct ProductIntoOptions {
    /// Whether the product is added to the matrix instead of replacing it.
    pub add: bool,
    /// See [`ProductOptions::tune`].
    pub tune: bool,
}

/// The version of cuBLASLt; 130103 means 13.1.3.
pub fn version() -> usize {
    // SAFETY: the call takes no arguments and accesses no memory of ours.
    unsafe { cudarc::cublaslt::sys::cublasLtGetVersion() }
}

/// Whether [`product`] accepts matrices of these types, for a result of type `out`.
pub fn takes(a: DType, b: DType, out: DType) -> bool {
    let known = matches!(a, DType::F32 | DType::BF16 | DType::F16);
    known && a == b && (out == a || out == DType::F32)
}

/// Computes `a b`, times a factor, plus `bias` on every row, in new memory.
///
/// # Shapes
/// - `a`: `[.., m, k]`, `b`: `[.., k, n]`, of types that [`takes`] allows, with equal leading
///   dimensions and any strides
/// - `bias`: `[n]`, of the result's type
/// - result: `[.., m, n]`
///
/// # Errors
/// The tensors are not on a CUDA device, or shapes or types do not fit. Later failures surface at
/// the next read of the result.
pub fn product(
    a: CubeTensor,
    b: CubeTensor,
    bias: Option<CubeTensor>,
    options: ProductOptions,
) -> Result<CubeTensor, CudaError> {
    let ProductOptions { scale, dtype, tune } = options;
    let mut shape: Shape = a.meta.shape().clone();
    let rank = shape.num_dims();
    if rank < 2 || b.meta.shape().num_dims() != rank {
        return Err(refused(
            &a,
            &b,
            "they must both be batches of matrices, with the same number \
                                   of dimensions",
        ));
    }
    shape[rank - 1] = b.meta.shape()[rank - 1];
    let out = empty(&a, shape, dtype);
    multiply(
        a,
        b,
        bias,
        &out,
        Factors {
            alpha: scale,
            beta: 0.0,
        },
        tune,
    )?;
    Ok(out)
}

/// Computes `into = a b` or `into += a b`, in place. The caller must ensure that `into` is not read
/// concurrently.
///
/// # Shapes
/// See [`product`]; `into`: `[.., m, n]`, f32 or the inputs' type, with contiguous rows.
///
/// # Errors
/// See [`product`].
pub fn product_into(
    a: CubeTensor,
    b: CubeTensor,
    into: &CubeTensor,
    options: ProductIntoOptions,
) -> Result<(), CudaError> {
    let ProductIntoOptions { add, tune } = options;
    multiply(
        a,
        b,
        None,
        into,
        Factors {
            alpha: 1.0,
            beta: f32::from(u8::from(add)),
        },
        tune,
    )
}

fn multiply(
    a: CubeTensor,
    b: CubeTensor,
    bias: Option<CubeTensor>,
    out: &CubeTensor,
    factors: Factors,
    may_tune: bool,
) -> Result<(), CudaError> {
    let Some(queue) = CudaQueue::of(out) else {
        return Err(refused(&a, &b, "they are not on a CUDA device"));
    };
    if out.meta.shape().num_elements() == 0 {
        return Ok(());
    }
    let shapes = [&a, &b].map(|x| x.meta.shape().clone());
    let (a, view_a) = MatrixView::of(a);
    let (b, view_b) = MatrixView::of(b);
    let bias = bias.map(crate::tensor::contiguous);
    let view_out = MatrixView::new(out.meta.shape(), out.meta.strides());
    let view_out = view_out.filter(|view| !view.transposed);
    let Some(view_out) = view_out else {
        return Err(refused(&a, &b, "the rows of the result must be contiguous"));
    };
    let dtypes = [a.dtype, b.dtype, out.dtype];
    let GemmOptions { tf32, tune, tuning } = options::options(&queue);
    let bias_dtype = bias
        .as_ref()
        .map(|bias| (bias.dtype, bias.meta.shape().num_elements()));
    let key = Key::new(
        [view_a, view_b, view_out],
        dtypes,
        bias_dtype,
        factors.beta != 0.0,
        tf32,
    )
    .map_err(|why| refused(&a, &b, &why))?;
    let describe = move || {
        let [a, b] = [shapes[0].as_slice(), shapes[1].as_slice()];
        let [of_a, of_b, of_out] = dtypes.map(|dtype| dtype.name());
        format!("matrix product {a:?} {of_a} x {b:?} {of_b} into {of_out}")
    };
    let mut op = Op::new(describe).reads(&a).reads(&b).writes(out);
    if let Some(bias) = &bias {
        op = op.reads(bias);
    }
    let tune = tune && may_tune;
    queue.enqueue(op, move |stream, buffers| {
        let operands = Operands {
            a: buffers.reads[0],
            b: buffers.reads[1],
            out: buffers.writes[0],
            bias: buffers.reads.get(2).copied(),
            scales: None,
        };
        library::run(&key, stream, operands, factors, (tune, tuning))
    });
    Ok(())
}

fn refused(a: &CubeTensor, b: &CubeTensor, why: &str) -> CudaError {
    CudaError::Refused(format!(
        "matrix product of {:?} {} and {:?} {}: {why}",
        a.meta.shape().as_slice(),
        a.dtype.name(),
        b.meta.shape().as_slice(),
        b.dtype.name()
    ))
}
