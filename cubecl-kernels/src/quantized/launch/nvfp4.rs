use std::ops::Range;

use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use crate::kernel_parts::{RandomStream, RowView, address_type};
use crate::quantized::kernels::{BLOCK_UNITS, BlockSizesLaunch, DrawnArgLaunch, nvfp4_kernel};
use crate::quantized::random_numbers::Drawn;

/// How the blocks of a matrix are quantised.
#[derive(Clone, Debug)]
pub(super) struct Nvfp4Options {
    /// Rows and columns of a block.
    pub(super) block: [usize; 2],
    /// The place of the matrix's largest magnitude.
    pub(super) amax_index: usize,
    /// The random numbers that elements are rounded with, if they are.
    pub(super) drawn: Option<Drawn>,
}

/// The numbers, in f32, that the elements of a matrix of f32, bf16 or f16 stand for in NVFP4.
///
/// # Shapes
/// `x: [rows, cols]` with any strides, `amax: [n]` in f32; the result is contiguous
pub(super) fn nvfp4_numbers(x: CubeTensor, amax: CubeTensor, options: Nvfp4Options) -> CubeTensor {
    let Nvfp4Options {
        block,
        amax_index,
        drawn,
    } = options;
    let [rows, cols] = [x.meta.shape()[0], x.meta.shape()[1]];
    let out = tensor::empty(&x, [rows, cols], DType::F32);
    let [tall, wide] = [block[0].min(rows), block[1].min(cols)];
    if rows * cols > 0 {
        let x = RowView::of(x);
        let blocks = rows.div_ceil(tall) * cols.div_ceil(wide);
        let stochastic = drawn.is_some();
        nvfp4_kernel::launch(
            &out.client,
            CubeCount::Static(blocks as u32, 1, 1),
            CubeDim::new_1d(BLOCK_UNITS),
            address_type(&[&x.tensor, &out]),
            x.tensor.clone().into_buffer_arg(),
            tensor::contiguous(amax).into_buffer_arg(),
            out.clone().into_buffer_arg(),
            drawn_arg(drawn),
            BlockSizesLaunch::new(
                rows as u32,
                cols as u32,
                x.stride as u32,
                tall as u32,
                wide as u32,
            ),
            amax_index as u32,
            stochastic,
            dtype_to_storage_type(x.tensor.dtype),
        );
    }
    out
}

/// The kernel argument that describes the random numbers.
fn drawn_arg(drawn: Option<Drawn>) -> DrawnArgLaunch {
    let random = match &drawn {
        Some(drawn) => RandomStream::of(&drawn.rng),
        None => RandomStream::nothing(),
    };
    let [first, width] = drawn
        .as_ref()
        .map_or([0; 2], |drawn| [drawn.first, drawn.width]);
    let [rows, cols] = drawn.map_or_else(Default::default, |drawn| [drawn.rows, drawn.cols]);
    let starts = |ranges: &[Range<usize>]| -> Vec<u32> {
        ranges.iter().map(|range| range.start as u32).collect()
    };
    DrawnArgLaunch {
        random,
        first,
        width,
        row_firsts: firsts(&rows).into_iter().collect(),
        row_starts: starts(&rows).into_iter().collect(),
        col_firsts: firsts(&cols).into_iter().collect(),
        col_starts: starts(&cols).into_iter().collect(),
    }
}

/// Where consecutive ranges begin that are laid one after the other.
fn firsts(ranges: &[Range<usize>]) -> Vec<u32> {
    let mut next = 0;
    let first = |range: &Range<usize>| {
        let first = next as u32;
        next += range.len();
        first
    };
    ranges.iter().map(first).collect()
}
