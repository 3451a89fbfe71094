//! The softmax between the products on CubeCL's GPUs: each row has a plane of 32 units. Forward
//! reads the scores from device memory once; backward reads the probabilities and their gradient
//! once.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{DType, FloatDType};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_autograd::backend_ops::cast;
use megaburn_cuda::tensor;

use super::scores::{Scores, Visible, fallback_gradient, fallback_softmax};

/// Units that work on one row.
const PLANE: u32 = 32;
/// Rows of a cube.
const ROWS: u32 = 8;

impl Scores for Cube {
    fn probabilities(
        scores: FloatTensor<Self>,
        visible: &Visible<'_>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        if scores.dtype() != DType::F32 {
            return cast::<Self>(fallback_softmax::<Self>(scores, visible), dtype);
        }
        let scores = tensor::contiguous(tensor::from_backend(scores));
        let out = tensor::empty(&scores, scores.shape(), dtype.into());
        let Visible {
            queries,
            keys,
            options,
            ..
        } = visible;
        let (rows, columns) = rows_of(&scores);
        let window = options
            .window
            .map(|window| window.min(i32::MAX as usize) as i32);
        softmax_kernel::launch(
            &scores.client.clone(),
            cubes(rows),
            CubeDim::new_2d(PLANE, ROWS),
            scores.into_buffer_arg(),
            out.clone().into_buffer_arg(),
            rows as u32,
            columns as u32,
            queries.len() as u32,
            (options.query_offset + queries.start) as i32 - keys.start as i32,
            window.unwrap_or(0),
            options.causal,
            window.is_some(),
            burn::backend::cubecl::dtype_to_storage_type(dtype.into()),
        );
        tensor::into_backend(out)
    }

    fn score_gradient(
        p: FloatTensor<Self>,
        dp: FloatTensor<Self>,
        output: Option<(FloatTensor<Self>, FloatTensor<Self>)>,
    ) -> FloatTensor<Self> {
        if dp.dtype() != DType::F32 {
            return fallback_gradient::<Self>(p, dp, output);
        }
        let [p, dp] = [p, dp].map(|x| tensor::contiguous(tensor::from_backend(x)));
        let out = tensor::empty(&p, p.shape(), p.dtype);
        let (rows, columns) = rows_of(&p);
        let dtype = burn::backend::cubecl::dtype_to_storage_type(p.dtype);
        gradient_kernel::launch(
            &p.client.clone(),
            cubes(rows),
            CubeDim::new_2d(PLANE, ROWS),
            p.into_buffer_arg(),
            dp.into_buffer_arg(),
            out.clone().into_buffer_arg(),
            rows as u32,
            columns as u32,
            dtype,
        );
        tensor::into_backend(out)
    }
}

/// The number of rows of the last dimension, and their length.
fn rows_of(x: &CubeTensor) -> (usize, usize) {
    let shape = x.meta.shape();
    let columns = shape[shape.num_dims() - 1];
    (shape.num_elements() / columns, columns)
}

fn cubes(rows: usize) -> CubeCount {
    CubeCount::Static(rows.div_ceil(ROWS as usize) as u32, 1, 1)
}

/// Softmax over the visible keys. `first` is the position of the first query, counted from the
/// first key; it may be negative.
#[cube(launch)]
fn softmax_kernel<F: Float>(
    scores: &[f32],
    out: &mut [F],
    rows: u32,
    columns: u32,
    queries: u32,
    first: i32,
    window: i32,
    #[comptime] causal: bool,
    #[comptime] windowed: bool,
    #[define(F)] _dtype: ElemType,
) {
    let row = CUBE_POS_X * 8 + UNIT_POS_Y;
    if row < rows {
        let position = first + i32::cast_from(row % queries);
        let mut start = 0i32;
        if windowed {
            start = max(position + 1 - window, 0i32);
        }
        let mut end = i32::cast_from(columns);
        if causal {
            end = min(position + 1, end);
        }
        let base = row as usize * columns as usize;
        let mut top = f32::new(-3.0e38);
        let mut at = start + i32::cast_from(UNIT_POS_X);
        while at < end {
            top = max(top, scores[base + usize::cast_from(at)]);
            at += 32i32;
        }
        let top = plane_max(top);
        let mut sum = f32::new(0.0);
        let mut at = start + i32::cast_from(UNIT_POS_X);
        while at < end {
            sum += (scores[base + usize::cast_from(at)] - top).exp();
            at += 32i32;
        }
        let sum = plane_sum(sum);
        // A query without keys has no sum; its probabilities are 0.
        let mut scale = f32::new(0.0);
        if start < end {
            scale = 1.0 / sum;
        }
        let mut column = UNIT_POS_X;
        while column < columns {
            let at = i32::cast_from(column);
            let index = base + column as usize;
            let mut p = f32::new(0.0);
            if at >= start && at < end {
                p = (scores[index] - top).exp() * scale;
            }
            out[index] = F::cast_from(p);
            column += 32;
        }
    }
}

#[cube(launch)]
fn gradient_kernel<F: Float>(
    p: &[F],
    dp: &[f32],
    out: &mut [F],
    rows: u32,
    columns: u32,
    #[define(F)] _dtype: ElemType,
) {
    let row = CUBE_POS_X * 8 + UNIT_POS_Y;
    if row < rows {
        let base = row as usize * columns as usize;
        let mut sum = f32::new(0.0);
        let mut column = UNIT_POS_X;
        while column < columns {
            let index = base + column as usize;
            sum += f32::cast_from(p[index]) * dp[index];
            column += 32;
        }
        let sum = plane_sum(sum);
        let mut column = UNIT_POS_X;
        while column < columns {
            let index = base + column as usize;
            out[index] = F::cast_from(f32::cast_from(p[index]) * (dp[index] - sum));
            column += 32;
        }
    }
}
