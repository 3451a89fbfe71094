//! Launches the kernels for scaling, partial sums of squares and their total.

use burn::backend::{TensorMetadata, cubecl::dtype_to_storage_type};
use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::addresses::{Access, table};
use megaburn_cuda::tensor;

use super::many::{entries, is_in_quads, planes};
use super::{cubes, lanes, on_gpu, units, wrap};
use crate::optimizer::kernels::gradients::{
    scale_kernel, squares_kernel, squares_of_many_kernel, total_kernel,
};
use crate::optimizer::kernels::many::QUAD;

/// The number of cubes of a sum; every multiprocessor of a large GPU gets several.
const SUMS: usize = 1024;

pub(in crate::optimizer) fn scaled(x: Tensor<1>, factor: Tensor<1>) -> Tensor<1> {
    let x = on_gpu(x);
    let factor = on_gpu(factor);
    let len = x.meta.num_elements();
    let lanes = lanes(len, &[x.dtype]);
    let client = x.client.clone();
    let dtype = dtype_to_storage_type(x.dtype);
    let (out, out_arg) = if x.can_mut() {
        (x.clone(), x.as_tensor_alias(0))
    } else {
        let out = tensor::empty(&x, x.shape(), x.dtype);
        (out.clone(), out.into_tensor_arg())
    };
    scale_kernel::launch(
        &client,
        cubes(len / lanes),
        units(),
        lanes,
        x.into_buffer_arg(),
        factor.into_buffer_arg(),
        out_arg.into_buffer_arg(),
        len / lanes,
        dtype,
    );
    wrap(out)
}

pub(in crate::optimizer) fn total(sums: Tensor<1>) -> Tensor<1> {
    let sums = on_gpu(sums);
    let out = tensor::empty(&sums, [1], DType::F32);
    let len = sums.meta.num_elements();
    total_kernel::launch(
        &sums.client.clone(),
        CubeCount::Static(1, 1, 1),
        units(),
        sums.into_buffer_arg(),
        out.clone().into_buffer_arg(),
        len as u64,
    );
    wrap(out)
}

/// Sums the tensors that the multi-tensor kernel supports in one launch, and the others one by one.
pub(in crate::optimizer) fn sums_of_squares(tensors: Vec<Tensor<1>>) -> Tensor<1> {
    let tensors = tensors.into_iter().map(on_gpu);
    let (many, others): (Vec<_>, Vec<_>) = tensors.partition(is_in_quads);
    let (many, others) = match many.len() {
        0 | 1 => (Vec::new(), [many, others].concat()),
        _ => (many, others),
    };
    let together = (!many.is_empty()).then(|| sums_of_many(&many));
    let sums = together
        .into_iter()
        .chain(others.into_iter().map(sums_of_one));
    Tensor::cat(sums.map(wrap).collect(), 0)
}

fn sums_of_one(x: CubeTensor) -> CubeTensor {
    let len = x.meta.num_elements();
    let dtype = dtype_to_storage_type(x.dtype);
    let lanes = lanes(len, &[x.dtype]);
    let sums = tensor::empty(&x, [SUMS], DType::F32);
    squares_kernel::launch(
        &x.client.clone(),
        CubeCount::Static(SUMS as u32, 1, 1),
        planes(),
        lanes,
        x.into_buffer_arg(),
        sums.clone().into_buffer_arg(),
        (len / lanes) as u64,
        dtype,
    );
    sums
}

/// Partial sums of squares of tensors that are [in quads](is_in_quads), in one launch.
fn sums_of_many(tensors: &[CubeTensor]) -> CubeTensor {
    let entries = entries(
        tensors.iter().map(|x| x.meta.num_elements()),
        [QUAD],
        |_| None,
    );
    let cubes = entries.len() / 2;
    let sums = tensor::empty(&tensors[0], [cubes], DType::F32);
    let table = table(tensors, Access::Read, entries);
    // SAFETY: the tensors are held until this returns, and have the number of quads that the table
    // states, from the stated addresses. Each cube writes one sum.
    unsafe {
        squares_of_many_kernel::launch_unchecked(
            &sums.client.clone(),
            CubeCount::Static(cubes as u32, 1, 1),
            planes(),
            table.into_buffer_arg(),
            sums.clone().into_buffer_arg(),
        );
    }
    sums
}
