//! The kernels: one unit a vector of four elements.

use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use super::{AdamwState, AdamwStep};

const UNITS: usize = 256;
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

/// Elements of a vector that divides `len`.
fn lanes(len: usize) -> usize {
    if len.is_multiple_of(4) { 4 } else { 1 }
}

/// A buffer that nobody else sees, with the same content.
fn own(x: CubeTensor) -> CubeTensor {
    if x.can_mut() {
        return x;
    }
    let copy = tensor::empty(&x, x.shape(), x.dtype);
    let len = x.meta.num_elements();
    let lanes = lanes(len);
    copy_kernel::launch(
        &x.client.clone(),
        cubes(len / lanes),
        CubeDim::new_1d(UNITS as u32),
        lanes,
        x.into_buffer_arg(),
        copy.clone().into_buffer_arg(),
    );
    copy
}

fn cubes(units: usize) -> CubeCount {
    CubeCount::Static(units.div_ceil(UNITS) as u32, 1, 1)
}

pub(super) fn adamw(state: AdamwState, grad: Tensor<1>, step: &AdamwStep) -> AdamwState {
    let AdamwState { param, exp_avg, exp_avg_sq } = state;
    let grad = on_gpu(grad);
    let [param, exp_avg, exp_avg_sq] = [param, exp_avg, exp_avg_sq].map(|x| own(on_gpu(x)));
    let len = grad.meta.num_elements();
    for x in [&grad, &param, &exp_avg, &exp_avg_sq] {
        assert!(
            x.dtype == DType::F32 && x.meta.num_elements() == len,
            "adamw: {} {} elements beside {len} f32 of the gradient",
            x.meta.num_elements(),
            x.dtype.name()
        );
    }
    let AdamwStep { lr, beta_1, beta_2, epsilon, weight_decay, grad_factor, .. } = *step;
    let lanes = lanes(len);
    adamw_kernel::launch(
        &grad.client.clone(),
        cubes(len / lanes),
        CubeDim::new_1d(UNITS as u32),
        lanes,
        grad.into_buffer_arg(),
        param.clone().into_buffer_arg(),
        exp_avg.clone().into_buffer_arg(),
        exp_avg_sq.clone().into_buffer_arg(),
        grad_factor as f32,
        beta_1 as f32,
        (1.0 - beta_1) as f32,
        beta_2 as f32,
        (1.0 - beta_2) as f32,
        (1.0 / step.correction(beta_2).sqrt()) as f32,
        epsilon as f32,
        (1.0 - lr * weight_decay) as f32,
        (lr / step.correction(beta_1)) as f32,
    );
    AdamwState { param: wrap(param), exp_avg: wrap(exp_avg), exp_avg_sq: wrap(exp_avg_sq) }
}

pub(super) fn sums_of_squares(x: Tensor<1>) -> Tensor<1> {
    let x = on_gpu(x);
    let len = x.meta.num_elements();
    let lanes = lanes(len);
    let sums = tensor::empty(&x, [SUMS], DType::F32);
    squares_kernel::launch(
        &x.client.clone(),
        CubeCount::Static(SUMS as u32, 1, 1),
        CubeDim::new_2d(32, UNITS as u32 / 32),
        lanes,
        x.into_buffer_arg(),
        sums.clone().into_buffer_arg(),
        (len / lanes) as u64,
    );
    wrap(sums)
}

#[cube(launch)]
fn copy_kernel<N: Size>(from: &[Vector<f32, N>], to: &mut [Vector<f32, N>]) {
    if ABSOLUTE_POS < from.len() {
        to[ABSOLUTE_POS] = from[ABSOLUTE_POS];
    }
}

#[cube(launch)]
fn adamw_kernel<N: Size>(
    grad: &[Vector<f32, N>],
    param: &mut [Vector<f32, N>],
    exp_avg: &mut [Vector<f32, N>],
    exp_avg_sq: &mut [Vector<f32, N>],
    grad_factor: f32,
    beta_1: f32,
    rest_1: f32,
    beta_2: f32,
    rest_2: f32,
    root_factor: f32,
    epsilon: f32,
    keep: f32,
    rate: f32,
) {
    if ABSOLUTE_POS < grad.len() {
        let g = grad[ABSOLUTE_POS] * Vector::new(grad_factor);
        let m = exp_avg[ABSOLUTE_POS] * Vector::new(beta_1) + g * Vector::new(rest_1);
        let v = exp_avg_sq[ABSOLUTE_POS] * Vector::new(beta_2) + g * g * Vector::new(rest_2);
        let root = v.sqrt() * Vector::new(root_factor) + Vector::new(epsilon);
        exp_avg[ABSOLUTE_POS] = m;
        exp_avg_sq[ABSOLUTE_POS] = v;
        param[ABSOLUTE_POS] =
            param[ABSOLUTE_POS] * Vector::new(keep) - m / root * Vector::new(rate);
    }
}

/// Each cube sums every `SUMS`-th stretch of as many vectors as it has units.
#[cube(launch)]
fn squares_kernel<N: Size>(x: &[Vector<f32, N>], sums: &mut [f32], vectors: u64) {
    let mut shared = Shared::new_slice(8usize);
    let mut sum = Vector::<f32, N>::new(0.0);
    let mut at = ABSOLUTE_POS;
    let step = CUBE_COUNT * 256;
    while at < vectors as usize {
        let value = x[at];
        sum += value * value;
        at += step;
    }
    let sum = plane_sum(Vector::vector_sum(sum));
    if UNIT_POS_X == 0 {
        shared[UNIT_POS_Y as usize] = sum;
    }
    sync_cube();
    if UNIT_POS == 0 {
        let mut total = f32::new(0.0);
        #[unroll]
        for i in 0..8 {
            total += shared[i];
        }
        sums[CUBE_POS] = total;
    }
}
