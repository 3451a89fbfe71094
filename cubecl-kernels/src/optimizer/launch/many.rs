//! Multi-tensor kernels: one launch over many buffers, given by a table of addresses. The buffers
//! are f32 in quads of 16 bytes.

use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::CudaQueue;
use megaburn_cuda::addresses::Entry;

use super::UNITS;
use crate::kernel_parts::assembly::{OPERANDS, registers, value};

/// A vector of four numbers.
pub(super) type Quad = Vector<f32, Const<4>>;

/// Bytes of a quad in memory.
pub(super) const QUAD: u64 = 16;

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
/// length of `lens`; the sets follow each other.
pub(super) fn entries<const N: usize>(
    lens: impl Iterator<Item = usize>,
    bytes: [u64; N],
) -> Vec<Entry> {
    let of_set = |(set, len): (usize, usize)| {
        let quads = len / 4;
        (0..quads).step_by(QUADS_PER_CHUNK).flat_map(move |start| {
            let place = move |i| Entry::Offset(set * N + i, bytes[i] * start as u64);
            let count = QUADS_PER_CHUNK.min(quads - start) as u64;
            (0..N).map(place).chain([Entry::Number(count)])
        })
    };
    lens.enumerate().flat_map(of_set).collect()
}

/// The shape of a cube: `UNITS` units, in planes of 32.
pub(super) fn planes() -> CubeDim {
    CubeDim::new_2d(32, UNITS as u32 / 32)
}

/// Loads the quad at an address.
#[cube]
pub(super) fn quad_at(at: u64) -> Quad {
    let at = value::<u64>(at);
    let quad: Quad;
    let text = comptime!(format!(
        "ld.global.v4.f32 {}, [%4];{OPERANDS}",
        registers(0..4)
    ));
    gpu_asm!("{text}{quad} {at}", quad = out(_) quad, at = in(_) at);
    quad
}

/// Stores a quad at an address, as f32 or rounded to nearest in the dtype with the PTX name
/// `as_narrow`.
#[cube]
pub(super) fn put_quad(at: u64, quad: Quad, #[comptime] as_narrow: Option<&'static str>) {
    let at = value::<u64>(at);
    let a = value::<f32>(quad.extract(0usize));
    let b = value::<f32>(quad.extract(1usize));
    let c = value::<f32>(quad.extract(2usize));
    let d = value::<f32>(quad.extract(3usize));
    let text = comptime!(put(as_narrow));
    gpu_asm!(
        "{text}{at} {a} {b} {c} {d}",
        at = in(_) at,
        a = in(_) a,
        b = in(_) b,
        c = in(_) c,
        d = in(_) d,
    );
}

fn put(as_narrow: Option<&'static str>) -> String {
    let text = match as_narrow {
        None => format!("st.global.v4.f32 [%0], {};", registers(1..5)),
        // `cvt` puts its second source into the lower half, which comes first in memory.
        Some(narrow) => format!(
            "{{ .reg .b32 first, second; cvt.rn.{narrow}x2.f32 first, %2, %1; \
             cvt.rn.{narrow}x2.f32 second, %4, %3; st.global.v2.b32 [%0], {{first, second}}; }}"
        ),
    };
    text + OPERANDS
}
