//! Grouped GEMM: multiplies ranges of rows by one matrix each, in one launch, on Hopper's tensor
//! cores. This is for experts so numerous and small that the host cannot launch their GEMMs one by
//! one as fast as they are computed, and that a single one leaves most of the GPU idle.
//!
//! Source: Megatron-LM `megatron/core/transformer/moe/experts.py`, grouped GEMM; DeepGEMM's
//! "k-grouped" and "m-grouped" GEMMs.

pub(super) mod gradients;
pub(super) mod products;

use std::ops::Range;

use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::addresses::{Access, Entry, table, written_by};
use megaburn_cuda::tensor::{self, MatrixView};

use super::kernels::{Major, PLANES, ROWS, Shape, rows_kernel, weights_kernel};
use crate::kernel_parts::address_type;
use crate::kernel_parts::tensor_cores::is_hopper;

/// The most row tiles of a table; each takes 24 bytes.
const MOST_TILES: usize = 8192;

/// The tile shape of the weight-gradient kernel. Its shared memory allows two cubes per
/// multiprocessor.
const GRADIENTS: Shape = Shape {
    columns: 128,
    left: Major::Lines,
    right: Major::Lines,
    stages: 3,
    dtype: "",
};

/// Whether the GPU of this tensor can run the kernels, and they support its dtype.
fn runs_on(x: &CubeTensor) -> bool {
    dtype_name(x.dtype).is_some() && is_hopper(x)
}

/// Multiplies each range of rows of `x` by its matrix; the result has the common dtype.
///
/// Returns `None` where the kernel cannot: rows must start at multiples of 16 bytes, and all
/// matrices must have the same layout. The kernel must [run](runs_on) on the GPU of `x`.
///
/// # Shapes
/// `x: [r, k]`, matrices `[k, n]`, anywhere in memory; result `[r, n]`
fn rows_times_matrices(
    x: CubeTensor,
    stretches: &[Range<usize>],
    matrices: &[CubeTensor],
) -> Option<CubeTensor> {
    let (x, of_x) = MatrixView::of(x);
    let of_w = same_view(matrices)?;
    let right = if of_w.transposed {
        Major::Terms
    } else {
        Major::Lines
    };
    let dtype = dtype_name(x.dtype)?;
    let shape = Shape {
        columns: 256,
        left: Major::Terms,
        right,
        stages: 4,
        dtype,
    };
    let out = tensor::empty(&x, [of_x.rows, of_w.cols], x.dtype);
    let tiles = stretches.iter().enumerate().flat_map(|(i, stretch)| {
        stretch.clone().step_by(ROWS).flat_map(move |first| {
            let [start, rows] = [first, stretch.end - first].map(|n| Entry::Number(n as u64));
            [Entry::Address(i), start, rows]
        })
    });
    let entries: Vec<Entry> = tiles.collect();
    let num_tiles = entries.len() / 3;
    let can = fits(&x, &shape)
        && matrices
            .iter()
            .all(|matrix| matrix.dtype == x.dtype && begins_where_chunks_do(matrix))
        && begins_where_chunks_do(&x)
        && !of_x.transposed
        && of_w.rows == of_x.cols
        && [of_x.ld, of_w.ld, of_w.rows, of_w.cols]
            .iter()
            .all(|len| len.is_multiple_of(8))
        && num_tiles <= MOST_TILES
        && address_type(&[&x, &out]) == AddressType::U32;
    if !can {
        return None;
    }
    let table = table(matrices, Access::Read, entries);
    // SAFETY: rows and columns past the last are neither read nor written. The matrices whose
    // addresses are in the table are held until this returns, and have the shape and strides that
    // `same_view` found.
    unsafe {
        rows_kernel::launch_unchecked(
            &x.client.clone(),
            CubeCount::Static(
                of_w.cols.div_ceil(shape.columns) as u32,
                num_tiles as u32,
                1,
            ),
            CubeDim::new_2d(32, PLANES),
            x.clone().into_buffer_arg(),
            table.into_buffer_arg(),
            out.clone().into_buffer_arg(),
            of_x.ld as u32,
            of_w.ld as u32,
            of_w.rows as u32,
            of_w.cols as u32,
            shape,
            dtype_to_storage_type(x.dtype),
        );
    }
    Some(out)
}

/// Computes weight gradients, `xᵀ dy` over the rows of each matrix.
struct Gradients {
    x: CubeTensor,
    of_x: MatrixView,
    dy: CubeTensor,
    of_dy: MatrixView,
    shape: Shape,
}

impl Gradients {
    /// Prepares the gradients of these rows. Returns `None` where the kernel cannot compute them.
    ///
    /// # Shapes
    /// `x: [r, m]`, `dy: [r, n]`
    fn of(x: CubeTensor, dy: CubeTensor) -> Option<Self> {
        let (x, of_x) = MatrixView::of(x);
        let (dy, of_dy) = MatrixView::of(dy);
        let shape = Shape {
            dtype: dtype_name(x.dtype)?,
            ..GRADIENTS
        };
        let fits_chunks = |(x, view): (&CubeTensor, MatrixView)| {
            !view.transposed
                && view.ld.is_multiple_of(8)
                && view.cols.is_multiple_of(8)
                && begins_where_chunks_do(x)
        };
        let can = runs_on(&x)
            && dy.dtype == x.dtype
            && of_dy.rows == of_x.rows
            && [(&x, of_x), (&dy, of_dy)].into_iter().all(fits_chunks)
            && address_type(&[&x, &dy]) == AddressType::U32
            && fits(&x, &shape);
        can.then_some(Self {
            x,
            of_x,
            dy,
            of_dy,
            shape,
        })
    }

    /// Allocates an uninitialized buffer for one gradient.
    fn room(&self) -> CubeTensor {
        tensor::empty(&self.x, [self.of_x.cols, self.of_dy.cols], DType::F32)
    }

    /// Adds the gradient of each range to its sum, or stores it where there is no sum yet.
    ///
    /// # Shapes
    /// sums: `[m, n]` in f32, contiguous
    fn add(self, stretches: &[Range<usize>], sums: &[CubeTensor], are_there: &[bool]) {
        let Self {
            x,
            of_x,
            dy,
            of_dy,
            shape,
        } = self;
        let shape_of = |sum: &CubeTensor| sum.meta.shape().dims::<2>() == [of_x.cols, of_dy.cols];
        assert!(
            stretches.iter().all(|stretch| stretch.end <= of_x.rows)
                && sums
                    .iter()
                    .all(|sum| shape_of(sum) && sum.dtype == DType::F32)
                && [sums.len(), are_there.len()] == [stretches.len(); 2],
            "gradients of rows {stretches:?} of {} with shape [{}, {}] do not match the given \
            sums",
            of_x.rows,
            of_x.cols,
            of_dy.cols
        );
        let of_stretch = |(i, (stretch, is_there)): (usize, (&Range<usize>, &bool))| {
            let numbers = [stretch.start, stretch.len(), usize::from(*is_there)];
            let [first, rows, adds] = numbers.map(|number| Entry::Number(number as u64));
            [Entry::Address(i), first, rows, adds]
        };
        let entries = stretches
            .iter()
            .zip(are_there)
            .enumerate()
            .flat_map(of_stretch);
        // The sums are not kernel arguments; reading `done` shows whether the kernel ran. Allocate
        // it before the table: an allocation may move other buffers, whose addresses are in the
        // table.
        let done = tensor::empty(&x, [1], DType::U32);
        let table = table(sums, Access::Write, entries.collect());
        let tiles = [
            of_dy.cols.div_ceil(shape.columns),
            of_x.cols.div_ceil(ROWS),
            sums.len(),
        ];
        let [columns, rows, num] = tiles.map(|count| count as u32);
        // SAFETY: as above; ranges lie within the rows of both operands. Sums have the written
        // shape, are contiguous and f32, and the caller allows writing to them.
        unsafe {
            weights_kernel::launch_unchecked(
                &x.client.clone(),
                CubeCount::Static(columns, rows, num),
                CubeDim::new_2d(32, PLANES),
                x.clone().into_buffer_arg(),
                dy.clone().into_buffer_arg(),
                table.into_buffer_arg(),
                done.clone().into_buffer_arg(),
                of_x.ld as u32,
                of_dy.ld as u32,
                of_x.cols as u32,
                of_dy.cols as u32,
                shape,
                dtype_to_storage_type(x.dtype),
            );
        }
        written_by(&done, sums);
    }
}

/// The common layout of all matrices, if they have one.
fn same_view(matrices: &[CubeTensor]) -> Option<MatrixView> {
    let view = |x: &CubeTensor| {
        if x.meta.is_tiled() {
            None
        } else {
            MatrixView::new(x.meta.shape(), x.meta.strides())
        }
    };
    let first = view(matrices.first()?)?;
    matrices
        .iter()
        .all(|matrix| view(matrix) == Some(first))
        .then_some(first)
}

fn begins_where_chunks_do(x: &CubeTensor) -> bool {
    x.handle.offset_start.unwrap_or(0).is_multiple_of(16)
}

fn fits(x: &CubeTensor, shape: &Shape) -> bool {
    let properties = x.client.properties();
    properties.features.copy_async && shape.shared() <= properties.hardware.max_shared_memory_size
}

fn dtype_name(dtype: DType) -> Option<&'static str> {
    match dtype {
        DType::BF16 => Some("bf16"),
        DType::F16 => Some("f16"),
        _ => None,
    }
}
