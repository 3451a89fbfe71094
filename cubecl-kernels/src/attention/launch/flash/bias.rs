//! Launches the kernels of the gradient of a bias by distance.

use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use super::arguments::{bounds_of, dims, dtype_of, line_of, rows};
use super::shapes::{bias_shape, products_of};
use crate::attention::kernels::flash::visible::{Side, Visible};
use crate::attention::kernels::flash::{
    DIAGONAL_ROWS, Dropout, Scale, flash_backward_bias, sum_diagonals,
};
use crate::attention::options::AttentionOptions;

/// The gradient of the bias, `[hq, s_q + s_k - 1]` in f32.
pub(super) fn gradient(
    [q, k, v]: [&CubeTensor; 3],
    bias: &CubeTensor,
    [dout, lse, delta]: [&CubeTensor; 3],
    options: &AttentionOptions,
) -> CubeTensor {
    let [s_q, b, hq, d] = dims(q);
    let [s_k, _, hkv, _] = dims(k);
    let shape = bias_shape(d, dims(v)[3], options, products_of(q, options));
    let sums = tensor::empty(q, Shape::from([hq, s_q, s_k]), DType::F32);
    let cubes =
        [s_q.div_ceil(shape.rows()), s_k.div_ceil(shape.tile), hq].map(|count| count as u32);
    // SAFETY: rows and columns past the last are neither read nor written, and all else is inside
    // the shapes, which the caller has checked.
    unsafe {
        flash_backward_bias::launch_unchecked(
            &q.client.clone(),
            CubeCount::Static(cubes[0], cubes[1], cubes[2]),
            CubeDim::new_2d(32, shape.planes as u32),
            q.clone().into_buffer_arg(),
            k.clone().into_buffer_arg(),
            v.clone().into_buffer_arg(),
            dout.clone().into_buffer_arg(),
            lse.clone().into_buffer_arg(),
            delta.clone().into_buffer_arg(),
            sums.clone().into_buffer_arg(),
            bounds_of(options, Side::Keys, q),
            line_of(Some(bias), q),
            rows(q),
            rows(k),
            rows(v),
            rows(dout),
            Visible::launch_arg(options),
            (hq / hkv) as u32,
            b as u32,
            Scale::launch_arg(options, d),
            Dropout::launch_arg(options),
            shape,
            dtype_of(q),
        );
    }
    let columns = s_q + s_k - 1;
    let line = tensor::empty(q, Shape::from([hq, columns]), DType::F32);
    sum_diagonals::launch(
        &q.client.clone(),
        CubeCount::Static(columns.div_ceil(32) as u32, hq as u32, 1),
        CubeDim::new_2d(32, DIAGONAL_ROWS),
        sums.into_buffer_arg(),
        line.clone().into_buffer_arg(),
        s_q as u32,
        s_k as u32,
    );
    line
}
