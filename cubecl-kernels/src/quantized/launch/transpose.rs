use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use crate::kernel_parts::address_type;
use crate::quantized::kernels::{CAST_UNITS, CastSizesLaunch, TILE, transpose_kernel};

/// The transpose of a matrix in FP8, as the [cast](super::cast()) writes it.
///
/// # Shapes
/// `x: [rows, cols]` in u8; result: `[cols, padded]`, where `padded` is `rows` rounded up to a
/// multiple of 16 and the bytes from `rows` on are 0
pub(super) fn transposed_bytes(x: CubeTensor) -> CubeTensor {
    let x = tensor::contiguous(x);
    let [rows, cols] = [x.meta.shape()[0], x.meta.shape()[1]];
    let padded = rows.next_multiple_of(16);
    let out = tensor::empty(&x, [cols, padded], DType::U8);
    if rows * cols == 0 {
        return out;
    }
    let (word, words, bytes) = if cols.is_multiple_of(8) {
        (DType::U32, 2, 8)
    } else {
        (DType::U8, 1, 1)
    };
    let [down, across] = [rows, cols].map(|len| len.div_ceil(TILE as usize) as u32);
    transpose_kernel::launch(
        &out.client,
        CubeCount::Static(across, down, 1),
        CubeDim::new_2d(32, CAST_UNITS / 32),
        address_type(&[&x, &out]),
        words,
        x.clone().into_buffer_arg(),
        out.clone().into_buffer_arg(),
        CastSizesLaunch::new(
            rows as u32,
            cols as u32,
            (cols / bytes) as u32,
            padded as u32,
        ),
        dtype_to_storage_type(word),
    );
    out
}
