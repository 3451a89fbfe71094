use std::ops::Range;

use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::ops::numeric::zeros_client;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::cells::{from_bits, no_amax};
use super::loads::loads;
use crate::kernel_parts::{RowView, address_type, lanes};
use crate::quantized::kernels::{AMAX_UNITS, amax_kernel};

/// Most cubes of a launch: eight for each multiprocessor of a large GPU.
const CUBES: usize = 132 * 8;

/// The largest magnitude in a tensor of f32, bf16 or f16 with any strides: NaN if it has a NaN, 0
/// if it is empty. The same bits in every run.
///
/// # Shapes
/// `x: [..]`; result: `[1]` in f32
pub fn amax(x: CubeTensor) -> CubeTensor {
    largest(RowView::of(by_memory(x)), None)
}

/// The largest magnitude of each range of rows, as [`amax`].
///
/// # Shapes
/// `x: [rows, cols]` with any strides; result: `[ranges]` in f32
pub(super) fn amaxes(x: CubeTensor, rows: &[Range<usize>]) -> CubeTensor {
    largest(RowView::of(x), Some(rows))
}

fn largest(x: RowView, rows: Option<&[Range<usize>]>) -> CubeTensor {
    let num = rows.map_or(1, <[_]>::len);
    let out = match rows {
        Some(rows) => {
            let (client, device) = (x.tensor.client.clone(), x.tensor.device.clone());
            zeros_client(client, device, Shape::new([rows.len()]), DType::U32)
        }
        None => no_amax(&x.tensor),
    };
    let num_rows = match rows {
        Some(rows) => rows.iter().map(Range::len).max().unwrap_or(0),
        None => x.count,
    };
    let elements = num_rows * x.len;
    if elements > 0 {
        let lanes = lanes(x.tensor.dtype, &[x.len, x.stride]);
        let (loads, element, size) = loads(x.tensor.dtype, lanes);
        let vectors = elements / lanes;
        let ranges = match rows {
            Some(rows) => {
                let ends = rows.iter().flat_map(|rows| [rows.start, rows.end]);
                words(&x.tensor, ends.map(|row| row as u32).collect())
            }
            None => x.tensor.clone(),
        };
        // Ranges have other lengths, so there are more cubes than for as many rows of one matrix.
        let cubes = (2 * CUBES).div_ceil(num).min(CUBES);
        amax_kernel::launch(
            &out.client,
            CubeCount::Static(
                vectors.div_ceil(AMAX_UNITS as usize).min(cubes) as u32,
                num as u32,
                1,
            ),
            CubeDim::new_2d(32, AMAX_UNITS / 32),
            address_type(&[&x.tensor, &out]),
            size,
            x.tensor.clone().into_buffer_arg(),
            ranges.into_buffer_arg(),
            out.clone().into_buffer_arg(),
            vectors,
            x.len / lanes,
            x.stride / lanes,
            x.stride == x.len || x.count == 1,
            rows.is_some(),
            loads,
            [element, x.tensor.dtype].map(dtype_to_storage_type),
        );
    }
    from_bits(out)
}

/// Numbers of a kernel on the device of `like`.
pub(super) fn words(like: &CubeTensor, words: Vec<u32>) -> CubeTensor {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let handle = like.client.create_from_slice(&bytes);
    let (client, device) = (like.client.clone(), like.device.clone());
    let shape = Shape::new([words.len()]);
    CubeTensor::new_contiguous(client, device, shape, handle, DType::U32)
}

/// The tensor with its dimensions in the order of its memory, so that a transposed one is read in
/// place: its maximum does not depend on the order.
fn by_memory(mut x: CubeTensor) -> CubeTensor {
    let dims = x.meta.num_dims();
    if x.meta.is_tiled() {
        return x;
    }
    for last in (1..dims).rev() {
        for i in 0..last {
            let strides = x.meta.strides();
            if strides[i] < strides[i + 1] {
                x.meta.swap(i, i + 1);
            }
        }
    }
    x
}
