use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::gemm::Fp8Kind;
use megaburn_cuda::tensor;

use super::loads::loads;
use crate::kernel_parts::{RowView, address_type, lanes};
use crate::quantized::kernels::{CAST_UNITS, CastSizesLaunch, CastVariant, TILE, cast_kernel};

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
    let CastOptions {
        kind,
        largest,
        power_of_two,
        straight,
        transposed,
    } = options;
    let [rows, cols] = [x.meta.shape()[0], x.meta.shape()[1]];
    let padded = rows.next_multiple_of(16);
    let scale_inv = tensor::empty(&x, [1], DType::F32);
    let empty = |wanted: bool, shape| wanted.then(|| tensor::empty(&x, shape, DType::U8));
    let out = Cast {
        straight: empty(straight, [rows, cols]),
        transposed: empty(transposed, [cols, padded]),
        scale_inv,
    };
    let x = RowView::of(x);
    let lanes = lanes(x.tensor.dtype, &[cols, x.stride]);
    let (loads, element, size) = loads(x.tensor.dtype, lanes);
    let variant = CastVariant {
        e5m2: kind == Fp8Kind::E5m2,
        power_of_two,
        straight,
        transposed,
        loads,
    };
    let (word, words) = if cols.is_multiple_of(8) {
        (DType::U32, 2)
    } else {
        (DType::U8, 1)
    };
    // An empty matrix has a scale too: one cube computes it.
    let cubes = |size: usize| size.div_ceil(TILE as usize).max(1) as u32;
    let or_any = |tensor: Option<&CubeTensor>| {
        let used = tensor.filter(|tensor| tensor.meta.num_elements() > 0);
        used.unwrap_or(&out.scale_inv).clone()
    };
    let from = or_any(Some(&x.tensor));
    let straight = or_any(out.straight.as_ref());
    let transposed = or_any(out.transposed.as_ref());
    cast_kernel::launch(
        &out.scale_inv.client,
        CubeCount::Static(cubes(cols), cubes(rows), 1),
        CubeDim::new_2d(32, CAST_UNITS / 32),
        address_type(&[&from, &straight, &transposed]),
        size,
        words,
        from.into_buffer_arg(),
        amax.into_buffer_arg(),
        straight.into_buffer_arg(),
        transposed.into_buffer_arg(),
        out.scale_inv.clone().into_buffer_arg(),
        CastSizesLaunch::new(
            rows as u32,
            cols as u32,
            (x.stride / lanes) as u32,
            padded as u32,
        ),
        largest,
        variant,
        [element, x.tensor.dtype, word].map(dtype_to_storage_type),
    );
    out
}
