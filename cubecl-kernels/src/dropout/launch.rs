//! Dropout on CubeCL GPU backends. The mask is generated where it is used and never stored in
//! memory.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use super::fallback;
use super::kernels::*;
use super::key::{RowStarts, kept};
use super::op::{Drop, DropoutInput, Mask};
use crate::kernel_parts::{RandomStream, RowView, address_type, lanes, sum_parts};

const UNITS: usize = 256;
/// Target cube count for the bias gradient: several per multiprocessor of a large GPU.
const CUBES: usize = 132 * 4;
/// Rows that a unit of the bias-gradient kernel loads at once.
const AHEAD: u32 = 4;

impl Drop for Cube {
    fn forward(mask: &Mask, input: DropoutInput<FloatTensor<Self>>) -> FloatTensor<Self> {
        if input.x.dtype() == DType::F64 {
            return fallback::forward::<Self>(mask, input);
        }
        let DropoutInput { x, bias, residual } = input;
        let [x, bias, residual] = [Some(x), bias, residual].map(|t| t.map(tensor::from_backend));
        let x = x.expect("x is present");
        tensor::into_backend(launch_forward(mask, DropoutInput { x, bias, residual }))
    }

    fn backward(
        mask: &Mask,
        dy: FloatTensor<Self>,
        bias: Option<DType>,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
        if dy.dtype() == DType::F64 {
            return fallback::backward::<Self>(mask, dy, bias);
        }
        let (dx, dbias) = launch_backward(mask, tensor::from_backend(dy), bias);
        (tensor::into_backend(dx), dbias.map(tensor::into_backend))
    }
}

/// The vector width for rows that begin at `starts`. It is above 1 only if every row begins at a
/// block of four random numbers and the width is a multiple of four.
fn lanes_of(starts: &RowStarts, dtype: DType, lens: &[usize]) -> usize {
    let lanes = lanes(dtype, lens);
    let mut strides = starts.dims.iter().map(|&(_, by)| by).chain([starts.first]);
    if lanes >= 4 && strides.all(|by| by.is_multiple_of(4)) {
        lanes
    } else {
        1
    }
}

/// The kernel argument that describes the mask.
fn mask_arg(mask: &Mask, starts: RowStarts) -> MaskArgLaunch {
    let mut dims = starts.dims;
    let (_, outer) = dims.pop().unwrap_or((1, 0));
    MaskArgLaunch {
        random: RandomStream::of(mask.key.rng()),
        first: starts.first,
        sizes: dims.iter().map(|&(size, _)| size as u32).collect(),
        strides: dims.iter().map(|&(_, by)| by).collect(),
        outer,
        p: mask.p as f32,
        kept: kept(mask.p),
    }
}

fn launch_forward(mask: &Mask, input: DropoutInput<CubeTensor>) -> CubeTensor {
    let DropoutInput { x, bias, residual } = input;
    let dtype = x.dtype;
    let starts = mask.key.row_starts(x.meta.shape());
    let y = tensor::empty(&x, x.shape(), dtype);
    let elements = y.meta.num_elements();
    if elements == 0 {
        return y;
    }
    let x = RowView::of(x);
    let [biased, added] = [bias.is_some(), residual.is_some()];
    let steps = Steps {
        dropped: mask.p > 0.0,
        biased,
        added,
    };
    let residual = residual.map(RowView::of);
    let (residual, residual_stride) = match residual {
        Some(rows) => (rows.tensor, rows.stride),
        None => (x.tensor.clone(), x.stride),
    };
    let bias = bias.map_or_else(|| x.tensor.clone(), tensor::contiguous);
    let lanes = lanes_of(&starts, dtype, &[x.len, x.stride, residual_stride]);
    let dtypes = [dtype, bias.dtype].map(dtype_to_storage_type);
    forward_kernel::launch(
        &y.client.clone(),
        CubeCount::Static((elements / lanes).div_ceil(UNITS) as u32, 1, 1),
        CubeDim::new_1d(UNITS as u32),
        address_type(&[&x.tensor, &residual, &y]),
        lanes,
        x.tensor.into_buffer_arg(),
        bias.into_buffer_arg(),
        residual.into_buffer_arg(),
        y.clone().into_buffer_arg(),
        mask_arg(mask, starts),
        elements / lanes,
        (x.len / lanes) as u32,
        (x.stride / lanes) as u32,
        (residual_stride / lanes) as u32,
        steps,
        dtypes,
    );
    y
}

fn launch_backward(
    mask: &Mask,
    dy: CubeTensor,
    bias: Option<DType>,
) -> (CubeTensor, Option<CubeTensor>) {
    let dropped = mask.p > 0.0;
    let Some(bias) = bias else {
        let input = DropoutInput {
            x: dy.clone(),
            bias: None,
            residual: None,
        };
        return (
            if dropped {
                launch_forward(mask, input)
            } else {
                dy
            },
            None,
        );
    };
    let dtype = dy.dtype;
    let starts = mask.key.row_starts(dy.meta.shape());
    let dx = if dropped {
        tensor::empty(&dy, dy.shape(), dtype)
    } else {
        dy.clone()
    };
    let dy = RowView::of(dy);
    let lanes = lanes_of(&starts, dtype, &[dy.len, dy.stride]);
    let width = dy.len / lanes;
    let columns = width.div_ceil(UNITS).max(1);
    let parts = (CUBES / columns).clamp(1, dy.count.div_ceil(AHEAD as usize).max(1));
    let sums = tensor::empty(&dx, [parts, dy.len], DType::F32);
    biased_backward_kernel::launch(
        &dx.client.clone(),
        CubeCount::Static(columns as u32, parts as u32, 1),
        CubeDim::new_1d(UNITS as u32),
        address_type(&[&dy.tensor, &dx, &sums]),
        lanes,
        dy.tensor.into_buffer_arg(),
        dx.clone().into_buffer_arg(),
        sums.clone().into_buffer_arg(),
        mask_arg(mask, starts),
        dy.count as u32,
        width as u32,
        (dy.stride / lanes) as u32,
        parts as u32,
        dropped,
        AHEAD,
        dtype_to_storage_type(dtype),
    );
    let [dbias] = sum_parts([(sums, bias)], parts as u32);
    (dx, Some(dbias))
}
