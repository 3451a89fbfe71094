//! The tables of multi-tensor kernels: see [`kernels::many`](crate::optimizer::kernels::many).

use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::CudaQueue;
use megaburn_cuda::addresses::Entry;

use crate::optimizer::kernels::UNITS;
use crate::optimizer::kernels::many::QUAD;

/// Quads per cube.
const QUADS_PER_CHUNK: usize = 16 << 10;

/// Whether a buffer is f32 and consists of quads.
pub(super) fn is_in_quads(x: &CubeTensor) -> bool {
    x.dtype == DType::F32 && has_quads(x, QUAD)
}

/// Whether a buffer consists of quads of `bytes` bytes each, aligned to their size.
pub(super) fn has_quads(x: &CubeTensor, bytes: u64) -> bool {
    let len = x.meta.num_elements();
    len > 0
        && len.is_multiple_of(4)
        && x.handle.offset_start.unwrap_or(0).is_multiple_of(bytes)
        && CudaQueue::of(x).is_some()
}

/// The table: for each cube, the address of its chunk in each of `N` buffers, whose quads have
/// `bytes[i]` bytes, and the number of quads of the chunk. There is one set of `N` buffers for each
/// length of `lens`; the sets follow each other. `extra` gives another number for each chunk of a set.
pub(super) fn entries<const N: usize>(
    lens: impl Iterator<Item = usize>,
    bytes: [u64; N],
    extra: impl Fn(usize) -> Option<u64> + Copy,
) -> Vec<Entry> {
    let of_set = |(set, len): (usize, usize)| {
        let quads = len / 4;
        (0..quads).step_by(QUADS_PER_CHUNK).flat_map(move |start| {
            let place = move |i| Entry::Offset(set * N + i, bytes[i] * start as u64);
            let count = QUADS_PER_CHUNK.min(quads - start) as u64;
            let extra = extra(set).map(Entry::Number);
            (0..N).map(place).chain([Entry::Number(count)]).chain(extra)
        })
    };
    lens.enumerate().flat_map(of_set).collect()
}

/// The shape of a cube: `UNITS` units, in planes of 32.
pub(super) fn planes() -> CubeDim {
    CubeDim::new_2d(32, UNITS as u32 / 32)
}
