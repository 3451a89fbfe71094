//! Products on Hopper's tensor cores, started by four planes together. They read shared memory
//! directly: each row of the right operand once for 64 rows, where `mma.sync` reads it once for 16.
//!
//! Source: NVIDIA, PTX ISA 9.0, `wgmma`. The assembly writes its result before it has read all
//! inputs; this is safe because NVIDIA's compiler gives results registers of their own.

use std::fmt::Write;

use cubecl::prelude::*;

use super::tile::{STEP, steps};
use crate::kernel_parts::assembly::{OPERANDS, registers};
use crate::kernel_parts::tensor_cores::{self, PANEL, Pair, address, panel, size_is, split};

/// Rows that four planes multiply together.
pub(super) const ROWS: usize = 64;
/// Planes that multiply together: a warpgroup.
pub(in crate::attention) const PLANES: usize = 4;

/// The offset of column step `step` in the address of a tile of `rows` rows, in units of 16 bytes.
fn ahead_of_columns(step: usize, rows: usize) -> usize {
    let in_panel = PANEL / STEP;
    step / in_panel * panel(rows) + step % in_panel * 2
}

/// The assembly of a group of products. The registers that it writes must not be used until it is
/// done.
struct Assembly {
    text: String,
    dtype: &'static str,
}

impl Assembly {
    fn new(dtype: &'static str) -> Self {
        Self {
            text: "{\n.reg .b64 a, b;\n".into(),
            dtype,
        }
    }

    /// Initializes the result with the `count` numbers from register `first` on.
    fn with_result_of_inputs(mut self, count: usize, first: usize) -> Self {
        for i in 0..count {
            let _ = writeln!(self.text, "mov.f32 %{i}, %{};", first + i);
        }
        self
    }

    fn begun(mut self) -> Self {
        self.text += "wgmma.fence.sync.aligned;\n";
        self
    }

    /// Multiplies rows by rows of `d` elements, to `columns` columns, from the descriptors in
    /// registers `left` and `right`.
    fn with_rows(mut self, [left, right]: [usize; 2], [left_rows, columns, d]: [usize; 3]) -> Self {
        let sums = registers(0..columns / 2);
        let dtype = self.dtype;
        for step in 0..steps(d) {
            let a = ahead_of_columns(step, left_rows);
            let b = ahead_of_columns(step, columns);
            let adds = usize::from(step > 0);
            let _ = writeln!(
                self.text,
                "add.s64 a, %{left}, {a};\nadd.s64 b, %{right}, {b};\n\
                 wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{dtype}.{dtype} {sums}, a, b, {adds}, 1, 1, 0, 0;"
            );
        }
        self
    }

    /// Adds the products of weights (four registers from `left` on for each 16 of `rows` rows) with
    /// `columns` columns of the tile in register `right`.
    fn with_columns(mut self, [left, right]: [usize; 2], [rows, columns]: [usize; 2]) -> Self {
        let sums = registers(0..columns / 2);
        let dtype = self.dtype;
        for step in 0..rows / STEP {
            let a = registers(left + 4 * step..left + 4 * step + 4);
            let b = step * panel(STEP);
            let _ = writeln!(
                self.text,
                "add.s64 b, %{right}, {b};\n\
                 wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{dtype}.{dtype} {sums}, {a}, b, 1, 1, 1, 1;"
            );
        }
        self
    }

    /// The text of the complete group.
    fn done(self) -> String {
        self.text + "wgmma.commit_group.sync.aligned;\n}\n" + OPERANDS
    }
}

/// Registers of a vector for `count` numbers. Vector sizes are powers of two; the assembly ignores
/// the registers beyond `count`.
fn registers_for(count: usize) -> usize {
    count.next_power_of_two()
}

/// Waits until all groups except the last `pending` are done, then reads the `count` numbers that
/// they have written from register `first` on.
fn of_settling(pending: usize, count: usize, first: usize) -> String {
    let mut text = format!("wgmma.wait_group.sync.aligned {pending};\n");
    for i in 0..count {
        let _ = writeln!(text, "mov.f32 %{i}, %{};", first + i);
    }
    text + OPERANDS
}

fn of_rows(dtype: &'static str, left_rows: usize, columns: usize, d: usize) -> String {
    let count = registers_for(columns / 2);
    let assembly = Assembly::new(dtype).begun();
    assembly
        .with_rows([count, count + 1], [left_rows, columns, d])
        .done()
}

fn of_columns(dtype: &'static str, rows: usize, columns: usize) -> String {
    let count = registers_for(columns / 2);
    let words = 2 * count;
    let right = 2 * count + registers_for(rows / 4);
    let assembly = Assembly::new(dtype)
        .with_result_of_inputs(columns / 2, count)
        .begun();
    assembly
        .with_columns([words, right], [rows, columns])
        .done()
}

// The numbers of registers of a result and of weights, which each call sets.
define_size!(Sums);
define_size!(Words);

/// The value of a variable; passed to assembly directly, a variable would be its address.
#[cube]
fn read<P: Scalar, N: Size>(variable: Vector<P, N>) -> Vector<P, N> {
    intrinsic!(|scope| variable.read_value(scope).into())
}

/// Makes what was copied to shared memory visible to the tensor cores.
#[cube]
pub(super) fn show_to_tensor_cores() {
    gpu_asm!("fence.proxy.async.shared::cta;");
}

/// The first row of this plane's warpgroup. The broadcast shows the compiler that it is uniform
/// over the plane.
#[cube]
fn first_row() -> usize {
    let plane = plane_broadcast(UNIT_POS_Y, 0u32);
    (plane / comptime!(PLANES as u32) * comptime!(ROWS as u32)) as usize
}

/// The descriptor of the tile of `rows` rows at element `at`.
#[cube]
fn descriptor<F: Float>(tiles: &Shared<[F]>, at: usize, #[comptime] rows: usize) -> u64 {
    tensor_cores::descriptor(address::<F>(tiles, at), rows)
}

/// Starts [`multiply_rows`](super::tile::multiply_rows) for one row block: the 64 rows of four
/// planes of the tile at `at_left`.
#[cube]
#[allow(
    clippy::too_many_arguments,
    reason = "two operands and the product's shape"
)]
pub(super) fn multiply_rows<F: Float>(
    tiles: &Shared<[F]>,
    at_left: usize,
    at_right: usize,
    #[comptime] left_rows: usize,
    #[comptime] columns: usize,
    #[comptime] d: usize,
    #[comptime] dtype: &'static str,
) -> Array<Pair<f32>> {
    size_is::<Sums>(comptime!(registers_for(columns / 2)));
    let a = descriptor::<F>(tiles, at_left + first_row() * PANEL, left_rows);
    let b = descriptor::<F>(tiles, at_right, columns);
    let text = comptime!(of_rows(dtype, left_rows, columns, d));
    let products: Vector<f32, Sums>;
    gpu_asm!(
        "{text}{products} {a} {b}",
        products = out(_) products,
        a = in(_) a,
        b = in(_) b,
    );
    let mut found = Array::<Pair<f32>>::new(comptime!(columns / 4));
    split::<Sums>(products, &mut found, comptime!(columns / 4));
    found
}

/// See [`settle`](super::products::settle).
#[cube]
pub(super) fn settle(
    result: &mut Array<Pair<f32>>,
    #[comptime] count: usize,
    #[comptime] pending: usize,
) {
    let registers = comptime!(registers_for(2 * count));
    size_is::<Sums>(registers);
    let text = comptime!(of_settling(pending, 2 * count, registers));
    let begun = joined::<Sums>(&*result, count);
    let done: Vector<f32, Sums>;
    gpu_asm!("{text}{done} {begun}", done = out(_) done, begun = in(_) begun);
    split::<Sums>(done, result, count);
}

/// Starts [`add_columns`](super::tile::add_columns) for one row block.
#[cube]
pub(super) fn add_columns<F: Float>(
    weights: &Array<Pair<f32>>,
    tiles: &Shared<[F]>,
    at_right: usize,
    sums: &mut Array<Pair<f32>>,
    #[comptime] rows: usize,
    #[comptime] d: usize,
    #[comptime] dtype: &'static str,
) {
    let columns = comptime!(steps(d) * STEP);
    size_is::<Sums>(comptime!(registers_for(columns / 2)));
    size_is::<Words>(comptime!(registers_for(rows / 4)));
    let b = descriptor::<F>(tiles, at_right, rows);
    let words = words_of::<F, Words>(weights, comptime!(rows / 4));
    let before = joined::<Sums>(&*sums, comptime!(columns / 4));
    let text = comptime!(of_columns(dtype, rows, columns));
    let after: Vector<f32, Sums>;
    gpu_asm!(
        "{text}{after} {before} {words} {b}",
        after = out(_) after,
        before = in(_) before,
        words = in(_) words,
        b = in(_) b,
    );
    split::<Sums>(after, sums, comptime!(columns / 4));
}

/// Joins `count` pairs into a vector of numbers.
#[cube]
fn joined<N: Size>(pairs: &Array<Pair<f32>>, #[comptime] count: usize) -> Vector<f32, N> {
    let mut numbers = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for i in 0..count {
        numbers.insert(comptime!(2 * i), pairs[i].extract(0usize));
        numbers.insert(comptime!(2 * i + 1), pairs[i].extract(1usize));
    }
    read::<f32, N>(numbers)
}

/// Converts `count` pairs to a left operand.
#[cube]
fn words_of<F: Float, N: Size>(
    pairs: &Array<Pair<f32>>,
    #[comptime] count: usize,
) -> Vector<u32, N> {
    let mut words = Vector::<u32, N>::new(0u32);
    #[unroll]
    for i in 0..count {
        words.insert(i, u32::reinterpret(Pair::<F>::cast_from(pairs[i])));
    }
    read::<u32, N>(words)
}
