//! Matrix products through cuBLASLt: bf16, f16 and f32 in, fp32 accumulation, operands where they
//! are (transposed, sliced, pitched, batched), optionally added to what is there.
//!
//! cuBLASLt is column-major; a row-major `[R, C]` is a column-major `[C, R]`, so `D = A B` is asked
//! for as `Dᵀ = Bᵀ Aᵀ` by passing B first.

mod key;
mod plan;
mod suggestions;
mod tune;
mod tuned;

use std::{
    cell::Cell,
    sync::atomic::{AtomicBool, Ordering},
};

use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;

use crate::{
    CudaError, CudaQueue, Op,
    tensor::{MatrixView, empty},
};
use key::Key;
pub use tune::{Tuning, set_tuning_effort};

static TF32: AtomicBool = AtomicBool::new(false);
static TUNING: AtomicBool = AtomicBool::new(true);

/// Whether products of f32 matrices may round their inputs to tf32 (ten bits of mantissa), which is
/// eight times as fast. Off by default, as in PyTorch.
pub fn set_tf32(allowed: bool) {
    TF32.store(allowed, Ordering::Relaxed);
}

/// Whether the algorithm of a product is chosen by timing candidates when its shape first occurs,
/// which is the default; off, it is cuBLASLt's first suggestion, the same in every run. From the third number of rows on
/// that a matrix meets, it takes the algorithm that was the fastest for at most half as many again or as few, if there is
/// one.
pub fn set_tuning(on: bool) {
    TUNING.store(on, Ordering::Relaxed);
}

thread_local! {
    static REPRODUCIBLE: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work`, whose products on this thread are not tuned: equal matrices have equal products, to the
/// bit, on every GPU of a kind. For what several ranks compute each for itself.
pub fn deterministic<T>(work: impl FnOnce() -> T) -> T {
    struct Before(bool);
    impl Drop for Before {
        fn drop(&mut self) {
            REPRODUCIBLE.set(self.0);
        }
    }
    let _before = Before(REPRODUCIBLE.replace(true));
    work()
}

/// The version of cuBLASLt, as 130103 for 13.1.3.
pub fn version() -> usize {
    // SAFETY: takes and touches nothing.
    unsafe { cudarc::cublaslt::sys::cublasLtGetVersion() }
}

/// Whether [`product`] takes matrices of these types, for a result of type `out`.
pub fn takes(a: DType, b: DType, out: DType) -> bool {
    let known = matches!(a, DType::F32 | DType::BF16 | DType::F16);
    known && a == b && (out == a || out == DType::F32)
}

/// `a b * scale`, plus `bias` on every row, in new memory of type `dtype`.
///
/// # Shapes
/// - `a`: `[.., m, k]`, `b`: `[.., k, n]` of types that [`takes`] allows and with equal leading
///   dimensions, whatever their strides
/// - `bias`: `[n]` in `dtype`
/// - result: `[.., m, n]`; `dtype` is that of the inputs or f32
///
/// # Errors
/// The tensors are on no CUDA device, or shapes or types do not fit. What fails later is found by
/// the next read of the result.
pub fn product(
    a: CubeTensor,
    b: CubeTensor,
    bias: Option<CubeTensor>,
    scale: f32,
    dtype: DType,
) -> Result<CubeTensor, CudaError> {
    let mut shape: Shape = a.meta.shape().clone();
    let rank = shape.num_dims();
    if rank < 2 || b.meta.shape().num_dims() != rank {
        return Err(refused(&a, &b, "they are not two batches of matrices"));
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
    )?;
    Ok(out)
}

/// `into = a b` or, if `add`, `into += a b`, in place. The caller sees to it that nobody else reads
/// `into` meanwhile.
///
/// # Shapes
/// As [`product`]; `into`: `[.., m, n]`, f32 or the inputs' type, its rows contiguous.
///
/// # Errors
/// As [`product`].
pub fn product_into(
    a: CubeTensor,
    b: CubeTensor,
    into: &CubeTensor,
    add: bool,
) -> Result<(), CudaError> {
    multiply(
        a,
        b,
        None,
        into,
        Factors {
            alpha: 1.0,
            beta: f32::from(u8::from(add)),
        },
    )
}

/// `D = alpha A B + beta D`.
#[derive(Clone, Copy, Debug)]
struct Factors {
    alpha: f32,
    beta: f32,
}

fn multiply(
    a: CubeTensor,
    b: CubeTensor,
    bias: Option<CubeTensor>,
    out: &CubeTensor,
    factors: Factors,
) -> Result<(), CudaError> {
    let Some(queue) = CudaQueue::of(out) else {
        return Err(refused(&a, &b, "they are on no CUDA device"));
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
        return Err(refused(&a, &b, "the rows of the result are not contiguous"));
    };
    let dtypes = [a.dtype, b.dtype, out.dtype];
    let tf32 = TF32.load(Ordering::Relaxed);
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
    let tune = TUNING.load(Ordering::Relaxed) && !REPRODUCIBLE.get();
    queue.enqueue(op, move |stream, buffers| {
        let [a, b] = [buffers.reads[0], buffers.reads[1]];
        plan::run(
            &key,
            stream,
            [a, b, buffers.writes[0]],
            buffers.reads.get(2).copied(),
            factors,
            tune,
        )
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
