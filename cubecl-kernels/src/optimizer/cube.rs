//! How the kernels are launched: one unit a vector.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use super::kernels::{
    UNITS, adamw_kernel, copy_kernel, scale_kernel, squares_kernel, total_kernel,
};
use super::{AdamwState, AdamwStep};

/// Cubes of a sum: as many as give every multiprocessor of a large GPU several.
const SUMS: usize = 1024;

/// A tensor on a GPU as CubeCL's, unpitched.
fn on_gpu(x: Tensor<1>) -> CubeTensor {
    let primitive = x.try_into_primitive::<Cube>();
    let primitive = primitive.expect("all that belongs to a gradient on a GPU is there too");
    tensor::contiguous(tensor::from_backend(primitive))
}

fn wrap(x: CubeTensor) -> Tensor<1> {
    Tensor::from_primitive::<Cube>(tensor::into_backend(x))
}

/// Elements of a vector that divides `len`: 16 bytes of the widest buffer, else four elements, else one.
fn lanes(len: usize, dtypes: &[DType]) -> usize {
    let widest = dtypes.iter().map(|dtype| dtype.size()).max().expect("there is a buffer");
    [16 / widest, 4].into_iter().find(|lanes| len.is_multiple_of(*lanes)).unwrap_or(1)
}

/// A buffer that nobody else sees, with the same content.
fn own(x: CubeTensor) -> CubeTensor {
    if x.can_mut() {
        return x;
    }
    let copy = tensor::empty(&x, x.shape(), x.dtype);
    let (len, dtype) = (x.meta.num_elements(), dtype_to_storage_type(x.dtype));
    let lanes = lanes(len, &[x.dtype]);
    copy_kernel::launch(
        &x.client.clone(),
        cubes(len / lanes),
        CubeDim::new_1d(UNITS as u32),
        lanes,
        x.into_buffer_arg(),
        copy.clone().into_buffer_arg(),
        len / lanes,
        dtype,
    );
    copy
}

/// A buffer that nobody else sees, of the same size, whatever it holds.
fn room(x: CubeTensor) -> CubeTensor {
    if x.can_mut() { x } else { tensor::empty(&x, x.shape(), x.dtype) }
}

fn cubes(units: usize) -> CubeCount {
    CubeCount::Static(units.div_ceil(UNITS) as u32, 1, 1)
}

pub(super) fn adamw(
    state: AdamwState,
    grad: Tensor<1>,
    factor: Option<Tensor<1>>,
    step: &AdamwStep,
) -> AdamwState {
    let AdamwState { param, exp_avg, exp_avg_sq, rounded } = state;
    let [grad, param, exp_avg, exp_avg_sq] = [grad, param, exp_avg, exp_avg_sq].map(on_gpu);
    let [rounded, factor] = [rounded, factor].map(|x| x.map(on_gpu));
    let len = grad.meta.num_elements();
    let [param, exp_avg, exp_avg_sq] = [param, exp_avg, exp_avg_sq].map(own);
    let rounded = rounded.map(room);
    let AdamwStep { lr, beta_1, beta_2, epsilon, weight_decay, grad_factor, .. } = *step;
    // A kernel is given a buffer for each argument, also for those that it does not look at.
    let none = |dtype| tensor::empty(&grad, [1], dtype);
    let (rounds, scales) = (rounded.is_some(), factor.is_some());
    let rounded_arg = rounded.clone().unwrap_or_else(|| none(DType::BF16));
    let factor = factor.unwrap_or_else(|| none(DType::F32));
    let dtypes = [grad.dtype, param.dtype, exp_avg.dtype, exp_avg_sq.dtype, rounded_arg.dtype];
    let lanes = lanes(len, &dtypes);
    adamw_kernel::launch(
        &grad.client.clone(),
        cubes(len / lanes),
        CubeDim::new_1d(UNITS as u32),
        lanes,
        grad.into_buffer_arg(),
        param.clone().into_buffer_arg(),
        exp_avg.clone().into_buffer_arg(),
        exp_avg_sq.clone().into_buffer_arg(),
        rounded_arg.into_buffer_arg(),
        factor.into_buffer_arg(),
        len / lanes,
        grad_factor as f32,
        beta_1 as f32,
        (1.0 - beta_1) as f32,
        beta_2 as f32,
        (1.0 - beta_2) as f32,
        (1.0 / step.correction(beta_2).sqrt()) as f32,
        epsilon as f32,
        (1.0 - lr * weight_decay) as f32,
        (lr / step.correction(beta_1)) as f32,
        rounds,
        scales,
        dtypes.map(dtype_to_storage_type),
    );
    AdamwState {
        param: wrap(param),
        exp_avg: wrap(exp_avg),
        exp_avg_sq: wrap(exp_avg_sq),
        rounded: rounded.map(wrap),
    }
}

pub(super) fn scaled(x: Tensor<1>, factor: Tensor<1>) -> Tensor<1> {
    let (x, factor) = (on_gpu(x), on_gpu(factor));
    let len = x.meta.num_elements();
    let lanes = lanes(len, &[x.dtype]);
    let (client, dtype) = (x.client.clone(), dtype_to_storage_type(x.dtype));
    let (out, out_arg) = match x.can_mut() {
        true => (x.clone(), x.as_tensor_alias(0)),
        false => {
            let out = tensor::empty(&x, x.shape(), x.dtype);
            (out.clone(), out.into_tensor_arg())
        }
    };
    scale_kernel::launch(
        &client,
        cubes(len / lanes),
        CubeDim::new_1d(UNITS as u32),
        lanes,
        x.into_buffer_arg(),
        factor.into_buffer_arg(),
        out_arg.into_buffer_arg(),
        len / lanes,
        dtype,
    );
    wrap(out)
}

pub(super) fn total(sums: Tensor<1>) -> Tensor<1> {
    let sums = on_gpu(sums);
    let (out, len) = (tensor::empty(&sums, [1], DType::F32), sums.meta.num_elements());
    total_kernel::launch(
        &sums.client.clone(),
        CubeCount::Static(1, 1, 1),
        CubeDim::new_1d(UNITS as u32),
        sums.into_buffer_arg(),
        out.clone().into_buffer_arg(),
        len as u64,
    );
    wrap(out)
}

pub(super) fn sums_of_squares(x: Tensor<1>) -> Tensor<1> {
    let x = on_gpu(x);
    let (len, dtype) = (x.meta.num_elements(), dtype_to_storage_type(x.dtype));
    let lanes = lanes(len, &[x.dtype]);
    let sums = tensor::empty(&x, [SUMS], DType::F32);
    squares_kernel::launch(
        &x.client.clone(),
        CubeCount::Static(SUMS as u32, 1, 1),
        CubeDim::new_2d(32, UNITS as u32 / 32),
        lanes,
        x.into_buffer_arg(),
        sums.clone().into_buffer_arg(),
        (len / lanes) as u64,
        dtype,
    );
    wrap(sums)
}
