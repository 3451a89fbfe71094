//! Attention on tensor cores without scores in memory, for bf16 and f16 on NVIDIA GPUs.

mod backward;
mod backward_keys;
mod backward_queries;
mod delta;
mod forward;
mod tile;
mod visible;

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::{CudaQueue, tensor};

use super::AttentionOptions;
use super::kernel::{self, AttentionKernel};
use backward::{Backward, PLANES, ROWS};
use backward_keys::flash_backward_keys;
use backward_queries::flash_backward_queries;
use forward::{Forward, flash_forward};
use tile::RowsLaunch;
use visible::{Mask, Visible};

/// Whether the kernels compute this; everything else is composed.
pub(super) fn takes(inputs: &[CubeTensor; 3], options: &AttentionOptions) -> bool {
    let [q, k, v] = inputs;
    let heads = [dims(q)[3], dims(v)[3]];
    CudaQueue::of(q).is_some()
        && kernel::chosen().resolved(q.dtype, &heads) == AttentionKernel::Cubecl
        && [k, v].iter().all(|x| x.dtype == q.dtype)
        && options.factor(heads[0]) > 0.0
        // Positions are 32-bit numbers.
        && [q, k].iter().all(|x| dims(x)[0] + options.query_offset < i32::MAX as usize / 2)
}

/// `x` where it lies if its rows can be copied 16 bytes at a time, a copy otherwise.
pub(super) fn readable(x: CubeTensor) -> CubeTensor {
    let strides = x.meta.strides();
    let aligned = strides[..3].iter().all(|stride| stride.is_multiple_of(8));
    let offset = x.handle.offset_start.unwrap_or(0);
    if aligned && strides[3] == 1 && offset.is_multiple_of(16) { x } else { tensor::contiguous(x) }
}

/// The result, `[s_q, b, hq, d_v]`, and the logarithms of the sums, `[b, hq, s_q]` in f32. Inputs are
/// [`readable`].
pub(super) fn forward(
    [q, k, v]: [&CubeTensor; 3],
    options: &AttentionOptions,
) -> (CubeTensor, CubeTensor) {
    let ([s_q, b, hq, d], [_, _, hkv, d_v]) = (dims(q), dims(v));
    let shape = Forward { d, d_v, planes: 4, stretches: 1, keys: 64, mask: Mask::of(options) };
    let out = tensor::empty(q, Shape::from([s_q, b, hq, d_v]), q.dtype);
    let lse = tensor::empty(q, Shape::from([b, hq, s_q]), DType::F32);
    // SAFETY: rows behind the last are neither read nor written, and all else is inside the shapes
    // that the caller has checked.
    unsafe {
        flash_forward::launch_unchecked(
            &q.client.clone(),
            cubes(s_q, shape.queries(), hq, b),
            CubeDim::new_2d(32, shape.planes as u32),
            q.clone().into_buffer_arg(),
            k.clone().into_buffer_arg(),
            v.clone().into_buffer_arg(),
            out.clone().into_buffer_arg(),
            lse.clone().into_buffer_arg(),
            rows(q),
            rows(k),
            rows(v),
            Visible::launch_arg(options),
            (hq / hkv) as u32,
            base_2(options.factor(d)),
            shape,
            dtype_of(q),
        );
    }
    (out, lse)
}

/// The gradients of `q`, `k` and `v`.
pub(super) fn backward(
    inputs: [&CubeTensor; 3],
    out: CubeTensor,
    lse: CubeTensor,
    dout: CubeTensor,
    options: &AttentionOptions,
) -> [CubeTensor; 3] {
    let [q, k, v] = inputs;
    let dout = tensor::contiguous(dout);
    let delta = delta::row_sums(&out, &dout);
    let saved = [&dout, &lse, &delta];
    let [dq, dk, dv] = inputs.map(|x| tensor::empty(x, x.shape(), x.dtype));
    let (d, d_v) = (dims(q)[3], dims(v)[3]);
    let shape = |tile, of_keys, of_values| Backward {
        d,
        d_v,
        tile,
        mask: Mask::of(options),
        of_keys,
        of_values,
    };
    queries(inputs, saved, &dq, options, shape(64, false, false));
    // Sums and scores are in registers, of which a unit has 255: half of `d + d_v`, and a tile's rows.
    let kernels = match (d + d_v) / 2 {
        ..=128 => vec![shape(64, true, true)],
        129..=160 => vec![shape(32, true, true)],
        _ => vec![shape(32, true, false), shape(32, false, true)],
    };
    for shape in kernels {
        keys([q, k, v], saved, [&dk, &dv], options, shape);
    }
    [dq, dk, dv]
}

fn keys(
    [q, k, v]: [&CubeTensor; 3],
    [dout, lse, delta]: [&CubeTensor; 3],
    [dk, dv]: [&CubeTensor; 2],
    options: &AttentionOptions,
    shape: Backward,
) {
    let ([_, b, hq, d], [s_k, _, hkv, _]) = (dims(q), dims(k));
    // SAFETY: as the forward's.
    unsafe {
        flash_backward_keys::launch_unchecked(
            &q.client.clone(),
            cubes(s_k, ROWS, hkv, b),
            CubeDim::new_2d(32, PLANES as u32),
            q.clone().into_buffer_arg(),
            k.clone().into_buffer_arg(),
            v.clone().into_buffer_arg(),
            dout.clone().into_buffer_arg(),
            lse.clone().into_buffer_arg(),
            delta.clone().into_buffer_arg(),
            dk.clone().into_buffer_arg(),
            dv.clone().into_buffer_arg(),
            rows(q),
            rows(k),
            rows(v),
            rows(dout),
            Visible::launch_arg(options),
            (hq / hkv) as u32,
            base_2(options.factor(d)),
            options.factor(d) as f32,
            shape,
            dtype_of(q),
        );
    }
}

fn queries(
    [q, k, v]: [&CubeTensor; 3],
    [dout, lse, delta]: [&CubeTensor; 3],
    dq: &CubeTensor,
    options: &AttentionOptions,
    shape: Backward,
) {
    let ([s_q, b, hq, d], [_, _, hkv, _]) = (dims(q), dims(k));
    // SAFETY: as the forward's.
    unsafe {
        flash_backward_queries::launch_unchecked(
            &q.client.clone(),
            cubes(s_q, ROWS, hq, b),
            CubeDim::new_2d(32, PLANES as u32),
            q.clone().into_buffer_arg(),
            k.clone().into_buffer_arg(),
            v.clone().into_buffer_arg(),
            dout.clone().into_buffer_arg(),
            lse.clone().into_buffer_arg(),
            delta.clone().into_buffer_arg(),
            dq.clone().into_buffer_arg(),
            rows(q),
            rows(k),
            rows(v),
            rows(dout),
            Visible::launch_arg(options),
            (hq / hkv) as u32,
            base_2(options.factor(d)),
            options.factor(d) as f32,
            shape,
            dtype_of(q),
        );
    }
}

fn dims(x: &CubeTensor) -> [usize; 4] {
    x.meta.shape().dims()
}

fn rows(x: &CubeTensor) -> RowsLaunch {
    let strides = x.meta.strides();
    RowsLaunch::new(strides[0], strides[1], strides[2], x.meta.shape()[0] as u32)
}

fn cubes(rows: usize, of_cube: usize, heads: usize, b: usize) -> CubeCount {
    CubeCount::Static(rows.div_ceil(of_cube) as u32, heads as u32, b as u32)
}

fn dtype_of(x: &CubeTensor) -> ElemType {
    burn::backend::cubecl::dtype_to_storage_type(x.dtype)
}

/// The factor of a power of two that gives the power of e.
fn base_2(factor: f64) -> f32 {
    (factor * std::f64::consts::LOG2_E) as f32
}
