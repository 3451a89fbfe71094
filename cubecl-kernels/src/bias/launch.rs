//! Sums over rows on CubeCL GPU backends. One kernel sums all rows, or, for many rows, each cube
//! writes a partial sum and a second launch adds these; both orders are fixed. Rows are read once,
//! in place and in their own dtype.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use super::column_sum::ColumnSum;
use super::fallback;
use super::kernels::*;
use super::op::AddToRows;
use crate::kernel_parts::{RowView, address_type, lanes, wrap};

/// Units per cube of the kernel that adds a vector to rows.
const UNITS: usize = 256;
/// Target cube count of a sum over many rows: several per multiprocessor of a large GPU.
const CUBES: u32 = 132 * 4;
/// Up to this many rows, one cube sums all: a second kernel's launch would take longer than it
/// saves.
const FEW: usize = 2048;

impl ColumnSum for Cube {
    fn column_sum(x: FloatTensor<Self>, groups: usize, dtype: DType) -> FloatTensor<Self> {
        if [x.dtype(), dtype].contains(&DType::F64) {
            return fallback::column_sum::<Self>(x, groups, dtype);
        }
        let x = tensor::from_backend(x);
        let n = x.meta.shape()[x.meta.num_dims() - 1];
        let sum = tensor::empty(&x, [groups, n], dtype);
        tensor::into_backend(launch_sum(x, groups, sum, false))
    }

    fn add_column_sum(x: FloatTensor<Self>, sum: Option<Tensor<2>>) -> Tensor<2> {
        if x.dtype() == DType::F64 {
            return fallback::add_column_sum::<Self>(x, sum);
        }
        let x = tensor::from_backend(x);
        let n = x.meta.shape()[x.meta.num_dims() - 1];
        let add = sum.is_some();
        let sum = match sum {
            Some(sum) => {
                let sum = sum.try_into_primitive::<Self>();
                // The caller passed this buffer on, so it may be written in place.
                let sum = sum.expect("the gradient is on the bias's device");
                tensor::contiguous(tensor::from_backend(sum))
            }
            None => tensor::empty(&x, [1, n], DType::F32),
        };
        wrap(launch_sum(x, 1, sum, add))
    }
}

impl AddToRows for Cube {
    fn add_to_rows(
        x: FloatTensor<Self>,
        addend: FloatTensor<Self>,
        groups: usize,
    ) -> FloatTensor<Self> {
        if x.dtype() == DType::F64 {
            return fallback::add_to_rows::<Self>(x, addend, groups);
        }
        let [x, addend] = [x, addend].map(tensor::from_backend);
        tensor::into_backend(launch_add(x, addend, groups))
    }
}

/// Chooses the shape of a cube and the number of partial sums per column of a group.
fn plan(rows: usize, groups: usize, width: usize, add: bool) -> (CubeShape, u32) {
    let ahead = rows.div_ceil(AHEAD as usize).next_power_of_two() as u32;
    if groups > 1 || rows <= FEW {
        // Eight vectors of 16 bytes fill a cache line.
        let columns = (width.next_power_of_two() as u32).min(8);
        let workers = ahead.min(512 / columns);
        let columns = (width.next_power_of_two() as u32).min((256 / workers).max(columns));
        return (
            CubeShape {
                columns,
                workers,
                add,
            },
            1,
        );
    }
    let columns = (width.next_power_of_two() as u32).min(32);
    let workers = 256 / columns;
    let cubes = (width as u32).div_ceil(columns);
    let parts = (CUBES / cubes).clamp(1, ahead.div_ceil(workers));
    (
        CubeShape {
            columns,
            workers,
            add: add && parts == 1,
        },
        parts,
    )
}

/// Writes the sums of groups of rows to `out`, or adds them to it if `add` is set.
fn launch_sum(x: CubeTensor, groups: usize, out: CubeTensor, add: bool) -> CubeTensor {
    let x = RowView::of(x);
    if groups * x.len == 0 {
        return out;
    }
    let lanes = lanes(x.tensor.dtype, &[x.len, x.stride]);
    let rows = x.count / groups;
    let width = x.len / lanes;
    let (shape, parts) = plan(rows, groups, width, add);
    let sums = match parts {
        1 => out.clone(),
        _ => tensor::empty(&out, [parts as usize, x.len], DType::F32),
    };
    column_sum_kernel::launch(
        &out.client.clone(),
        CubeCount::Static(groups as u32, (width as u32).div_ceil(shape.columns), parts),
        CubeDim::new_2d(shape.columns, shape.workers),
        address_type(&[&x.tensor, &sums]),
        lanes,
        x.tensor.clone().into_buffer_arg(),
        sums.clone().into_buffer_arg(),
        rows as u32,
        width as u32,
        (x.stride / lanes) as u32,
        parts,
        shape,
        AHEAD,
        [x.tensor.dtype, sums.dtype].map(dtype_to_storage_type),
    );
    // There are few partial sums, so one more launch adds all of them.
    if parts > 1 {
        launch_sum(sums, 1, out, add)
    } else {
        out
    }
}

fn launch_add(x: CubeTensor, addend: CubeTensor, groups: usize) -> CubeTensor {
    let y = tensor::empty(&x, x.shape(), x.dtype);
    let elements = y.meta.num_elements();
    if elements == 0 {
        return y;
    }
    let x = RowView::of(x);
    let addend = tensor::contiguous(addend);
    let lanes = lanes(x.tensor.dtype, &[x.len, x.stride]);
    let dtypes = [x.tensor.dtype, addend.dtype].map(dtype_to_storage_type);
    add_kernel::launch(
        &y.client.clone(),
        CubeCount::Static((elements / lanes).div_ceil(UNITS) as u32, 1, 1),
        CubeDim::new_1d(UNITS as u32),
        address_type(&[&x.tensor, &addend, &y]),
        lanes,
        x.tensor.into_buffer_arg(),
        addend.into_buffer_arg(),
        y.clone().into_buffer_arg(),
        elements / lanes,
        (x.count / groups) as u32,
        (x.len / lanes) as u32,
        (x.stride / lanes) as u32,
        dtypes,
    );
    y
}
