use std::ops::Range;

use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::gemm::Fp8Kind;
use megaburn_cuda::tensor;

use super::amax::words;
use super::loads::loads;
use crate::kernel_parts::{RowView, address_type, lanes};
use crate::quantized::kernels::{
    CAST_UNITS, CastSizesLaunch, CastVariant, PLACE, SCALES, TILE, TILE_WORDS, cast_kernel,
};

/// How a matrix is cast to FP8.
#[derive(Clone, Copy, Debug)]
pub struct CastOptions {
    /// The format.
    pub kind: Fp8Kind,
    /// The magnitude that `amax` is mapped to: 448 in e4m3 and 57,344 in e5m2, the largest numbers
    /// of the formats, or less for a margin.
    pub largest: f32,
    /// Whether the scale is rounded down to a power of two.
    pub power_of_two: bool,
    /// Whether the matrix is written as it is.
    pub straight: bool,
    /// Whether its transpose is written.
    pub transposed: bool,
}

/// A matrix `[rows, cols]` in FP8: each number times `scale_inv` is the one that was cast.
#[derive(Clone, Debug)]
pub struct Cast {
    /// The matrix: `[rows, cols]` in u8.
    pub straight: Option<CubeTensor>,
    /// Its transpose: `[cols, padded]` in u8, where `padded` is `rows` rounded up to a multiple of
    /// 16. The bytes from `rows` on are 0: in a product that sums over rows, they add nothing.
    pub transposed: Option<CubeTensor>,
    /// The inverse of the scale: `[1]` in f32. NaN if `amax` is not finite.
    pub scale_inv: CubeTensor,
}

/// Casts a matrix of f32, bf16 or f16 to FP8 in one pass. `amax` is the largest magnitude to
/// represent, that of this matrix or of several that share a scale; larger ones become the
/// largest number of the format.
///
/// The scale is `largest / amax`, at most `2^126`, and 1 if `amax` is 0; a number `x` becomes the
/// FP8 number nearest to `x * scale`, of two the one that is even.
///
/// # Shapes
/// `x: [rows, cols]` with any strides, but a transposed view is copied first: cast the matrix itself
/// and take its transpose; `amax: [1]` in f32
pub fn cast(x: CubeTensor, amax: CubeTensor, options: CastOptions) -> Cast {
    let [rows, cols] = [x.meta.shape()[0], x.meta.shape()[1]];
    let padded = rows.next_multiple_of(16);
    let scale_inv = tensor::empty(&x, [1], DType::F32);
    let empty = |wanted: bool, shape| wanted.then(|| tensor::empty(&x, shape, DType::U8));
    let out = Cast {
        straight: empty(options.straight, [rows, cols]),
        transposed: empty(options.transposed, [cols, padded]),
        scale_inv,
    };
    // An empty matrix has a scale too: one cube computes it.
    let tiles = rows.div_ceil(TILE as usize).max(1);
    launch(x, amax, &out, (None, tiles), options);
    out
}

/// Casts each range of rows as a matrix of its own, in one pass over all; `None` for those without
/// rows.
///
/// # Shapes
/// As [`cast`]; `amaxes: [ranges]` in f32
pub(super) fn cast_ranges(
    x: CubeTensor,
    ranges: &[Range<usize>],
    amaxes: CubeTensor,
    options: CastOptions,
) -> Vec<Option<Cast>> {
    let cols = x.meta.shape()[1];
    let padded = |rows: &Range<usize>| rows.len().next_multiple_of(16);
    let mut tiles = Vec::new();
    // Where the matrix of each range and its transpose begin; at last, where they end.
    let mut places = vec![[0, 0]];
    for (index, rows) in ranges.iter().enumerate() {
        let [straight, transposed] = places[index];
        for first in rows.clone().step_by(TILE as usize) {
            tiles.extend([index, rows.start, rows.end, first, straight, transposed]);
        }
        let sizes = [rows.len() * cols, cols * padded(rows)].map(|size| size.div_ceil(PLACE));
        places.push([straight + sizes[0], transposed + sizes[1]]);
    }
    if tiles.is_empty() {
        return vec![None; ranges.len()];
    }
    let num_tiles = tiles.len() / TILE_WORDS as usize;
    let [straight, transposed] = places[ranges.len()];
    let empty = |wanted: bool, places: usize| {
        wanted.then(|| tensor::empty(&x, [places * PLACE], DType::U8))
    };
    let out = Cast {
        straight: empty(options.straight, straight),
        transposed: empty(options.transposed, transposed),
        scale_inv: tensor::empty(&x, [ranges.len() * SCALES], DType::F32),
    };
    let tiles = words(&x, tiles.into_iter().map(|word| word as u32).collect());
    launch(
        x,
        tensor::contiguous(amaxes),
        &out,
        (Some(tiles), num_tiles),
        options,
    );
    let part = |whole: &CubeTensor, start: usize, shape: &[usize]| {
        let found = tensor::uninitialized_slice(whole, start, shape.to_vec());
        found.expect("memory can be sliced at multiples of 512 bytes")
    };
    let of = |(index, rows): (usize, &Range<usize>)| {
        let [straight, transposed] = places[index].map(|place| place * PLACE);
        (!rows.is_empty()).then(|| Cast {
            straight: (out.straight.as_ref())
                .map(|whole| part(whole, straight, &[rows.len(), cols])),
            transposed: (out.transposed.as_ref())
                .map(|whole| part(whole, transposed, &[cols, padded(rows)])),
            scale_inv: part(&out.scale_inv, index * SCALES, &[1]),
        })
    };
    ranges.iter().enumerate().map(of).collect()
}

/// Launches the kernel for a number of rows of tiles, which are described if they are those of
/// ranges.
fn launch(
    x: CubeTensor,
    amax: CubeTensor,
    out: &Cast,
    (tiles, num_tiles): (Option<CubeTensor>, usize),
    options: CastOptions,
) {
    let CastOptions {
        kind,
        largest,
        power_of_two,
        straight,
        transposed,
    } = options;
    let [rows, cols] = [x.meta.shape()[0], x.meta.shape()[1]];
    let x = RowView::of(x);
    let lanes = lanes(x.tensor.dtype, &[cols, x.stride]);
    let (loads, element, size) = loads(x.tensor.dtype, lanes);
    let variant = CastVariant {
        e5m2: kind == Fp8Kind::E5m2,
        power_of_two,
        straight,
        transposed,
        ranged: tiles.is_some(),
        loads,
    };
    let (word, words) = if cols.is_multiple_of(8) {
        (DType::U32, 2)
    } else {
        (DType::U8, 1)
    };
    let across = cols.div_ceil(TILE as usize).max(1);
    let or_any = |tensor: Option<&CubeTensor>| {
        let used = tensor.filter(|tensor| tensor.meta.num_elements() > 0);
        used.unwrap_or(&out.scale_inv).clone()
    };
    let from = or_any(Some(&x.tensor));
    let straight = or_any(out.straight.as_ref());
    let transposed = or_any(out.transposed.as_ref());
    cast_kernel::launch(
        &out.scale_inv.client,
        CubeCount::Static(across as u32, num_tiles as u32, 1),
        CubeDim::new_2d(32, CAST_UNITS / 32),
        address_type(&[&from, &straight, &transposed]),
        size,
        words,
        from.into_buffer_arg(),
        amax.into_buffer_arg(),
        tiles
            .unwrap_or_else(|| out.scale_inv.clone())
            .into_buffer_arg(),
        straight.into_buffer_arg(),
        transposed.into_buffer_arg(),
        out.scale_inv.clone().into_buffer_arg(),
        CastSizesLaunch::new(
            rows as u32,
            cols as u32,
            (x.stride / lanes) as u32,
            rows.next_multiple_of(16) as u32,
        ),
        largest,
        variant,
        [element, x.tensor.dtype, word].map(dtype_to_storage_type),
    );
}
