//! Multi-tensor kernels: one launch over many buffers, given by a table of addresses. The buffers
//! are f32 in quads of 16 bytes.

use cubecl::prelude::*;

use crate::kernel_parts::assembly::{OPERANDS, registers, value};

/// A vector of four numbers.
pub(super) type Quad = Vector<f32, Const<4>>;

/// Bytes of a quad in memory.
pub(in crate::optimizer) const QUAD: u64 = 16;

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
