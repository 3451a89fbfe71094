//! Products of stretches of rows with a matrix each, all in one launch, on Hopper's tensor cores: for experts so
//! many and so small that the host cannot ask for their products one by one as fast as they are computed, and
//! that one of them leaves most of the GPU without work.
//!
//! Source: Megatron-LM `megatron/core/transformer/moe/experts.py`, grouped GEMM; the "k-grouped" and "m-grouped"
//! products of DeepGEMM.

mod assembly;
mod kernels;
mod shape;

use std::ops::Range;

use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::addresses::{Access, Entry, table, written_by};
use megaburn_cuda::tensor::{self, MatrixView};

use crate::cube::address_type;
use crate::cube::tensor_cores::is_hopper;
use kernels::{PLANES, rows_kernel, weights_kernel};
use shape::{Major, ROWS, Shape};

/// Tiles of rows that a table may have: 24 bytes each.
const MOST_TILES: usize = 8192;

/// What the kernel of the gradients has in shared memory leaves room for two cubes.
const GRADIENTS: Shape = Shape {
    columns: 128,
    left: Major::Lines,
    right: Major::Lines,
    stages: 3,
    dtype: "",
};

/// Whether the kernels run on the GPU of this tensor, and multiply its type.
pub(crate) fn runs_on(x: &CubeTensor) -> bool {
    dtype_name(x.dtype).is_some() && is_hopper(x)
}

/// Each stretch of rows of `x` times its matrix, in the dtype of both; none where the kernel cannot: it is for rows
/// that begin where 16 bytes do, and for matrices that all lie alike. `x` is of a GPU that it
/// [runs on](runs_on).
///
/// # Shapes
/// `x: [r, k]`, matrices `[k, n]`, wherever they lie; result `[r, n]`
pub(crate) fn rows_times_matrices(
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
    // SAFETY: rows and columns behind the last are neither read nor written, and the matrices whose addresses
    // the table has are held until this returns, of the shape and strides that `same_view` found.
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

/// Gradients of matrices, `xᵀ dy` of the rows of each.
pub(crate) struct Gradients {
    x: CubeTensor,
    of_x: MatrixView,
    dy: CubeTensor,
    of_dy: MatrixView,
    shape: Shape,
}

impl Gradients {
    /// Of these rows; none where the kernel cannot.
    ///
    /// # Shapes
    /// `x: [r, m]`, `dy: [r, n]`
    pub(crate) fn of(x: CubeTensor, dy: CubeTensor) -> Option<Self> {
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

    /// Memory for one.
    pub(crate) fn room(&self) -> CubeTensor {
        tensor::empty(&self.x, [self.of_x.cols, self.of_dy.cols], DType::F32)
    }

    /// Adds that of each stretch to its sum or, where there is none, puts it in its place.
    ///
    /// # Shapes
    /// sums: `[m, n]` in f32, contiguous
    pub(crate) fn add(self, stretches: &[Range<usize>], sums: &[CubeTensor], are_there: &[bool]) {
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
            "gradients of {stretches:?} of {} rows, [{}, {}], in other sums",
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
        // (Its sums are no arguments: by this one it is known whether it ran.) Before the table: to make room for it
        // others may be moved, whose addresses that has.
        let done = tensor::empty(&x, [1], DType::U32);
        let table = table(sums, Access::Write, entries.collect());
        let tiles = [
            of_dy.cols.div_ceil(shape.columns),
            of_x.cols.div_ceil(ROWS),
            sums.len(),
        ];
        let [columns, rows, num] = tiles.map(|count| count as u32);
        // SAFETY: as above: stretches are of the rows of both, sums have the shape that is written, contiguous and
        // in f32, and are the caller's to write.
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

/// How all the matrices lie, if they lie alike.
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
