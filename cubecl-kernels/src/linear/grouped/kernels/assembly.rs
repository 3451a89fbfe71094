//! The accumulation of a cube's output tile, as one block of inline PTX. The accumulators stay in
//! the registers in which `wgmma` sums them, which CubeCL cannot express for several registers.
//!
//! While the operands of one step are multiplied, `cp.async` copies those of later steps to shared
//! memory, in the layout that Hopper's `wgmma` reads: rows of 128 bytes with chunks swizzled by the
//! row number.
//!
//! Source: NVIDIA, PTX ISA 9.0, `wgmma` and `cp.async`; the order of a step is that of CUTLASS's
//! `sm90_mma_multistage_gmma_ss` (copies, barrier, products, copies of a later step).

use std::fmt::Write;

use super::shape::{CHUNK, Major, Shape, Side, TERMS};
use crate::kernel_parts::assembly::{OPERANDS, registers};
use crate::kernel_parts::tensor_cores::panel;

/// The K extent of one `wgmma` instruction.
const STEP: usize = 16;
/// The number of `wgmma` groups that may be in flight when the next step's group begins.
const PENDING: usize = 1;

/// The registers of the inputs, numbered after the accumulators in this order. Arrays hold the left
/// and the right operand.
struct Inputs {
    /// The address in the first stage of this unit's first chunk.
    to: [usize; 2],
    /// The address that the chunk is copied from.
    from: [usize; 2],
    /// The byte distance from `from` to this unit's next chunk of the same step.
    jump: [usize; 2],
    /// The byte distance from `from` to this unit's chunk of the next step.
    ahead: [usize; 2],
    /// The number of valid chunks, for `Major::Terms`.
    limit: [usize; 2],
    /// The first term (K index) of this unit's chunk; for `Major::Lines`, of its first chunk.
    first: [usize; 2],
    /// The number of terms of a sum (K).
    terms: usize,
    /// The `wgmma` descriptors of the operands in the first stage.
    descriptors: [usize; 2],
}

impl Inputs {
    fn from(first: usize) -> Self {
        let pair = |i: usize| [first + i, first + i + 1];
        Self {
            to: pair(0),
            from: pair(2),
            jump: pair(4),
            ahead: pair(6),
            limit: pair(8),
            first: pair(10),
            terms: first + 12,
            descriptors: pair(13),
        }
    }
}

/// The PTX text; its results are the `columns / 2` accumulators of a unit.
pub(super) fn sums(shape: &Shape) -> String {
    let Shape {
        columns, stages, ..
    } = *shape;
    let count = columns / 2;
    let inputs = Inputs::from(columns / 2);
    // A stage is written while products up to the step before the last may still read their stages.
    let ahead = stages - 1 - PENDING;
    let mut text = String::from(
        "{\n.reg .pred p;\n.reg .b32 left, coming, slot, reading, count, size, to;\n\
         .reg .b64 at, a, b, da, db, from0, from1;\n",
    );
    for i in 0..count {
        let _ = writeln!(text, "mov.f32 %{i}, 0f00000000;");
    }
    let terms = inputs.terms;
    let [left, right] = inputs.descriptors;
    let _ = writeln!(
        text,
        "mov.b32 left, %{terms};\nmov.b32 coming, %{terms};\nmov.b32 slot, 0;\nmov.b32 reading, 0;\n\
         mov.b64 da, %{left};\nmov.b64 db, %{right};\n\
         mov.b64 from0, %{};\nmov.b64 from1, %{};",
        inputs.from[0], inputs.from[1]
    );
    for _ in 0..ahead {
        text += &copies(shape, &inputs);
    }
    let _ = writeln!(
        text,
        "STEP:\ncp.async.wait_group {};\nfence.proxy.async.shared::cta;\nbar.sync 0;\n\
         wgmma.fence.sync.aligned;",
        ahead - 1
    );
    text += &products(shape);
    text += &copies(shape, &inputs);
    let units = shape.stage() / CHUNK;
    let _ = writeln!(
        text,
        "wgmma.wait_group.sync.aligned {PENDING};\n\
         add.u32 reading, reading, 1;\nadd.s64 da, da, {units};\nadd.s64 db, db, {units};\n\
         setp.eq.u32 p, reading, {stages};\n@p mov.b32 reading, 0;\n@p mov.b64 da, %{left};\n\
         @p mov.b64 db, %{right};\n\
         sub.s32 left, left, {TERMS};\nsetp.gt.s32 p, left, 0;\n@p bra STEP;\n\
         wgmma.wait_group.sync.aligned 0;\ncp.async.wait_group 0;\n}}"
    );
    text + "\n" + OPERANDS
}

/// Starts the products of a step.
fn products(shape: &Shape) -> String {
    let Shape { columns, dtype, .. } = *shape;
    let sums = registers(0..columns / 2);
    let mut text = String::new();
    let swapped = |major: Major| u32::from(major == Major::Lines);
    let of_left = swapped(shape.left);
    let of_right = swapped(shape.right);
    for step in 0..TERMS / STEP {
        let [a, b] = [shape.left, shape.right].map(|major| match major {
            Major::Terms => step * STEP * 2 / CHUNK,
            Major::Lines => step * panel(STEP),
        });
        let _ = writeln!(
            text,
            "add.s64 a, da, {a};\nadd.s64 b, db, {b};\n\
             wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{dtype}.{dtype} {sums}, a, b, 1, 1, 1, \
             {of_left}, {of_right};"
        );
    }
    text + "wgmma.commit_group.sync.aligned;\n"
}

/// Starts the copies of a later step's operands. Elements past the last term or line are
/// zero-filled.
fn copies(shape: &Shape, inputs: &Inputs) -> String {
    let mut text = String::new();
    for (i, side) in [shape.left(), shape.right()].into_iter().enumerate() {
        text += &copies_of(side, i, inputs);
    }
    let _ = writeln!(
        text,
        "cp.async.commit_group;\nsub.s32 coming, coming, {TERMS};\nadd.u32 slot, slot, {};\n\
         setp.eq.u32 p, slot, {};\n@p mov.b32 slot, 0;",
        shape.stage(),
        shape.shared()
    );
    text
}

/// Starts the copies of one operand.
fn copies_of(side: Side, i: usize, inputs: &Inputs) -> String {
    let limit = inputs.limit[i];
    let first = inputs.first[i];
    let mut text = match side.major {
        Major::Terms => {
            format!("setp.gt.s32 p, coming, %{first};\nselp.b32 count, %{limit}, 0, p;\n")
        }
        Major::Lines => {
            let rows = side.rows_between_pieces();
            let round_up = rows - 1;
            let bits = rows.trailing_zeros();
            format!(
                "sub.s32 count, coming, %{first};\nadd.s32 count, count, {round_up};\n\
                 shr.s32 count, count, {bits};\n"
            )
        }
    };
    let _ = writeln!(
        text,
        "add.u32 to, %{}, slot;\nmov.b64 at, from{i};",
        inputs.to[i]
    );
    for piece in 0..side.pieces() {
        let place = piece * side.between_pieces();
        let _ = writeln!(
            text,
            "setp.gt.s32 p, count, {piece};\nselp.b32 size, {CHUNK}, 0, p;\n\
             cp.async.cg.shared.global [to+{place}], [at], {CHUNK}, size;\nadd.s64 at, at, %{};",
            inputs.jump[i]
        );
    }
    let _ = writeln!(text, "add.s64 from{i}, from{i}, %{};", inputs.ahead[i]);
    text
}
