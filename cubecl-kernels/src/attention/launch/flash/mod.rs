//! Launches the kernels of [`flash`](crate::attention::kernels::flash).

mod arguments;
mod bias;
mod bounds;
mod shapes;

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::{CudaQueue, tensor};

use crate::attention::kernels::flash::visible::{Side, Visible};
use crate::attention::kernels::flash::{
    Backward, Dropout, MmaKind, Scale, flash_backward_keys, flash_backward_queries, flash_delta,
    flash_forward,
};
use crate::attention::options::{AttentionKernel, AttentionOptions, AttentionTiles};
use crate::kernel_parts::address_type;
use arguments::{bounds_of, dims, dtype_of, line_of, rows};
use shapes::{backward_shapes, bias_shape, forward_shape, products_of};

/// Whether the kernels support these inputs and options; anything else is composed attention.
pub(in crate::attention) fn takes(
    inputs: &[CubeTensor; 3],
    biased: bool,
    options: &AttentionOptions,
) -> bool {
    let [q, k, v] = inputs;
    let [s_q, b, hq, d] = dims(q);
    let d_v = dims(v)[3];
    let shared = shared_bytes(d, d_v, options, biased, products_of(q, options));
    CudaQueue::of(q).is_some()
        && options.kernel.resolved(q.dtype, &[d, d_v]) != AttentionKernel::Reference
        && [k, v].iter().all(|x| x.dtype == q.dtype)
        && Scale::fits(options, d)
        // Positions and element indices are 32-bit numbers, also in a tensor that the inputs are
        // slices of.
        && [q, k].iter().all(|x| dims(x)[0] + options.query_offset < i32::MAX as usize / 2)
        && address_type(&[q, k, v]) == AddressType::U32
        && s_q * b * hq * d.max(d_v) <= u32::MAX as usize
        && (!biased || hq * s_q * dims(k)[0] <= u32::MAX as usize)
        && fits(q, [b, hq], shared, options.tiles)
}

/// Whether the GPU has asynchronous copies, enough shared memory, and a grid of this size.
fn fits(q: &CubeTensor, grid: [usize; 2], shared: usize, tiles: AttentionTiles) -> bool {
    let properties = q.client.properties();
    let (_, heads, sequences) = properties.hardware.max_cube_count;
    let room = properties.hardware.max_shared_memory_size;
    assert!(
        shared <= room || tiles == AttentionTiles::default(),
        "{tiles:?}: the kernel needs {shared} bytes of shared memory, but the GPU has {room}"
    );
    properties.features.copy_async
        && shared <= room
        && grid[0] <= sequences as usize
        && grid[1] <= heads as usize
}

/// The bytes of shared memory of the largest kernel.
fn shared_bytes(
    d: usize,
    d_v: usize,
    options: &AttentionOptions,
    biased: bool,
    products: MmaKind,
) -> usize {
    let backward = backward_shapes(d, d_v, options, biased, products);
    let elements = backward
        .iter()
        .map(|shape| (2 * shape.shared(), 16 * shape.tile));
    let backward = elements
        .map(|(tiles, rows)| tiles + rows)
        .max()
        .unwrap_or(0);
    let of_bias = bias_shape(d, d_v, options, products).shared_by_sequences();
    let forward = forward_shape(d, d_v, options, biased, products).shared();
    backward
        .max(2 * forward)
        .max(if biased { 2 * of_bias } else { 0 })
}

/// `x` itself if its rows can be copied 16 bytes at a time, otherwise a contiguous copy.
pub(in crate::attention) fn readable(x: CubeTensor) -> CubeTensor {
    let strides = x.meta.strides();
    let aligned = strides[..3].iter().all(|stride| stride.is_multiple_of(8));
    let offset = x.handle.offset_start.unwrap_or(0);
    if aligned && strides[3] == 1 && offset.is_multiple_of(16) {
        x
    } else {
        tensor::contiguous(x)
    }
}

/// The result, `[s_q, b, hq, d_v]`, and the LSE, `[b, hq, s_q]` in f32. Inputs must be
/// [`readable`], and a bias contiguous and in f32.
pub(in crate::attention) fn forward(
    [q, k, v]: [&CubeTensor; 3],
    bias: Option<&CubeTensor>,
    options: &AttentionOptions,
) -> (CubeTensor, CubeTensor) {
    let [s_q, b, hq, d] = dims(q);
    let [_, _, hkv, d_v] = dims(v);
    let shape = forward_shape(d, d_v, options, bias.is_some(), products_of(q, options));
    let out = tensor::empty(q, Shape::from([s_q, b, hq, d_v]), q.dtype);
    let lse = tensor::empty(q, Shape::from([b, hq, s_q]), DType::F32);
    // SAFETY: rows past the last are neither read nor written, and all else is inside the shapes,
    // which the caller has checked.
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
            bounds_of(options, Side::Keys, q),
            line_of(bias, q),
            rows(q),
            rows(k),
            rows(v),
            Visible::launch_arg(options),
            (hq / hkv) as u32,
            Scale::launch_arg(options, d),
            Dropout::launch_arg(options),
            shape,
            dtype_of(q),
        );
    }
    (out, lse)
}

/// The gradients of `q`, `k` and `v`, and of the bias in f32 if there is one.
pub(in crate::attention) fn backward(
    inputs: [&CubeTensor; 3],
    bias: Option<&CubeTensor>,
    [out, lse]: [CubeTensor; 2],
    dout: CubeTensor,
    options: &AttentionOptions,
) -> ([CubeTensor; 3], Option<CubeTensor>) {
    let [q, _, v] = inputs;
    let dout = readable(dout);
    let dout = if dout.is_contiguous() {
        dout
    } else {
        tensor::contiguous(dout)
    };
    let delta = row_sums(&out, &dout);
    let saved = [&dout, &lse, &delta];
    let [dq, dk, dv] = inputs.map(|x| tensor::empty(x, x.shape(), x.dtype));
    let d = dims(q)[3];
    let d_v = dims(v)[3];
    for shape in backward_shapes(d, d_v, options, bias.is_some(), products_of(q, options)) {
        if shape.of_keys || shape.of_values {
            keys((inputs, bias), saved, [&dk, &dv], options, shape)
        } else {
            queries((inputs, bias), saved, &dq, options, shape)
        }
    }
    let of_bias = bias.map(|bias| bias::gradient(inputs, bias, saved, options));
    ([dq, dk, dv], of_bias)
}

/// `rowsum(dO * O)`, `[b, hq, s_q]`.
fn row_sums(out: &CubeTensor, dout: &CubeTensor) -> CubeTensor {
    const UNITS: usize = 256;
    let [s_q, b, hq, d_v] = dims(out);
    let delta = tensor::empty(out, Shape::from([b, hq, s_q]), DType::F32);
    let rows = s_q * b * hq;
    let chunks = d_v / 8;
    let cubes = (rows * chunks.next_power_of_two()).div_ceil(UNITS) as u32;
    // SAFETY: rows and chunks past the last are not read.
    unsafe {
        flash_delta::launch_unchecked(
            &out.client.clone(),
            CubeCount::Static(cubes, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            out.clone().into_buffer_arg(),
            dout.clone().into_buffer_arg(),
            delta.clone().into_buffer_arg(),
            rows as u32,
            s_q as u32,
            chunks,
            dtype_of(out),
        );
    }
    delta
}

fn keys(
    ([q, k, v], bias): ([&CubeTensor; 3], Option<&CubeTensor>),
    [dout, lse, delta]: [&CubeTensor; 3],
    [dk, dv]: [&CubeTensor; 2],
    options: &AttentionOptions,
    shape: Backward,
) {
    let [_, b, hq, d] = dims(q);
    let [s_k, _, hkv, _] = dims(k);
    // SAFETY: see `forward`.
    unsafe {
        flash_backward_keys::launch_unchecked(
            &q.client.clone(),
            cubes(s_k, shape.rows(), hkv, b),
            CubeDim::new_2d(32, shape.planes as u32),
            q.clone().into_buffer_arg(),
            k.clone().into_buffer_arg(),
            v.clone().into_buffer_arg(),
            dout.clone().into_buffer_arg(),
            lse.clone().into_buffer_arg(),
            delta.clone().into_buffer_arg(),
            dk.clone().into_buffer_arg(),
            dv.clone().into_buffer_arg(),
            bounds_of(options, Side::Queries, q),
            line_of(bias, q),
            rows(q),
            rows(k),
            rows(v),
            rows(dout),
            Visible::launch_arg(options),
            (hq / hkv) as u32,
            Scale::launch_arg(options, d),
            Dropout::launch_arg(options),
            shape,
            dtype_of(q),
        );
    }
}

fn queries(
    ([q, k, v], bias): ([&CubeTensor; 3], Option<&CubeTensor>),
    [dout, lse, delta]: [&CubeTensor; 3],
    dq: &CubeTensor,
    options: &AttentionOptions,
    shape: Backward,
) {
    let [s_q, b, hq, d] = dims(q);
    let [_, _, hkv, _] = dims(k);
    // SAFETY: see `forward`.
    unsafe {
        flash_backward_queries::launch_unchecked(
            &q.client.clone(),
            cubes(s_q, shape.rows(), hq, b),
            CubeDim::new_2d(32, shape.planes as u32),
            q.clone().into_buffer_arg(),
            k.clone().into_buffer_arg(),
            v.clone().into_buffer_arg(),
            dout.clone().into_buffer_arg(),
            lse.clone().into_buffer_arg(),
            delta.clone().into_buffer_arg(),
            dq.clone().into_buffer_arg(),
            bounds_of(options, Side::Keys, q),
            line_of(bias, q),
            rows(q),
            rows(k),
            rows(v),
            rows(dout),
            Visible::launch_arg(options),
            (hq / hkv) as u32,
            Scale::launch_arg(options, d),
            Dropout::launch_arg(options),
            shape,
            dtype_of(q),
        );
    }
}

fn cubes(rows: usize, of_cube: usize, heads: usize, b: usize) -> CubeCount {
    CubeCount::Static(rows.div_ceil(of_cube) as u32, heads as u32, b as u32)
}
