//! The softmax between the products on CubeCL GPU backends.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{DType, FloatDType};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use crate::attention::fallback::scores as fallback;
use crate::attention::kernels::scores::{gradient_kernel, softmax_kernel};
use crate::attention::scores::{Scores, Visible};

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
            return fallback::probabilities::<Self>(scores, visible, dtype);
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
            return fallback::score_gradient::<Self>(p, dp, output);
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
