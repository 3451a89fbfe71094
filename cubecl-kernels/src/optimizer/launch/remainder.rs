//! Launches the kernels for masters that are kept as remainders.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Tensor};
use megaburn_cuda::tensor;

use super::{cubes, lanes, on_gpu, units, wrap};
use crate::optimizer::kernels::remainder::{joined_master_kernel, master_remainder_kernel};

pub(in crate::optimizer) fn joined_master(param: Tensor<1>, remainder: Tensor<1>) -> Tensor<1> {
    let [param, remainder] = [param, remainder].map(on_gpu);
    let master = tensor::empty(&param, param.shape(), DType::F32);
    let len = param.meta.num_elements();
    let lanes = lanes(len, &[DType::F32]);
    joined_master_kernel::launch(
        &param.client.clone(),
        cubes(len / lanes),
        units(),
        lanes,
        param.into_buffer_arg(),
        remainder.into_buffer_arg(),
        master.clone().into_buffer_arg(),
        len / lanes,
    );
    wrap(master)
}

pub(in crate::optimizer) fn master_remainder(master: Tensor<1>, param: Tensor<1>) -> Tensor<1> {
    let [master, param] = [master, param].map(on_gpu);
    let remainder = tensor::empty(&param, param.shape(), DType::BF16);
    let len = param.meta.num_elements();
    let lanes = lanes(len, &[DType::F32]);
    master_remainder_kernel::launch(
        &master.client.clone(),
        cubes(len / lanes),
        units(),
        lanes,
        master.into_buffer_arg(),
        param.into_buffer_arg(),
        remainder.clone().into_buffer_arg(),
        len / lanes,
    );
    wrap(remainder)
}
