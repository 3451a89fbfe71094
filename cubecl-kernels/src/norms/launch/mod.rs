//! Norms on CubeCL GPU backends: one kernel in the forward pass; in the backward pass one for the
//! rows and one that sums the gradients of gamma and beta.

mod vectors;

use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_autograd::backend_ops::cast;
use megaburn_cuda::tensor;

use super::fallback;
use super::kernels::*;
use super::op::{Norm, NormInput, NormInputGrads, NormRows, SavedNorm};
use super::options::NormGrads;
use crate::kernel_parts::{RowGroup, RowView, address_type, lanes};
use vectors::vector_gradients;

/// Multiprocessors of a large GPU.
const PROCESSORS: u32 = 132;

/// The number of backward cubes that a large GPU runs at once, limited by registers and the shared
/// memory of stages. With this grid all teams run concurrently and there are few partial sums.
fn resident(flavor: NormVariant, team: RowGroup, shared: usize, room: usize) -> u32 {
    let units = match flavor {
        NormVariant { stages: 0, .. } | NormVariant { beta: true, .. } => 512,
        NormVariant { add: true, .. } => 768,
        _ => 1024,
    };
    let by_shared = room.checked_div(shared).unwrap_or(usize::MAX).max(1);
    let by_units = (units / team.cube_dim().num_elems()).max(1);
    PROCESSORS * by_units.min(by_shared.min(32) as u32)
}

impl NormRows for Cube {
    fn normed(norm: Norm, input: NormInput<FloatTensor<Self>>) -> FloatTensor<Self> {
        if !has_kernel(&input.x) {
            return fallback::normed::<Self>(norm, input);
        }
        Self::forward(norm, input).0
    }

    fn forward(
        norm: Norm,
        input: NormInput<FloatTensor<Self>>,
    ) -> (
        FloatTensor<Self>,
        FloatTensor<Self>,
        SavedNorm<FloatTensor<Self>>,
    ) {
        if !has_kernel(&input.x) {
            return fallback::forward::<Self>(norm, input);
        }
        let (y, sum, saved) = launch_forward(norm, input.map(tensor::from_backend));
        (
            tensor::into_backend(y),
            tensor::into_backend(sum),
            saved.map(tensor::into_backend),
        )
    }

    fn backward(
        norm: Norm,
        saved: SavedNorm<FloatTensor<Self>>,
        dy: FloatTensor<Self>,
        dsum: Option<FloatTensor<Self>>,
        sums: &NormGrads,
    ) -> NormInputGrads<FloatTensor<Self>> {
        if saved.dtype == DType::F64 {
            return fallback::backward::<Self>(norm, saved, dy, dsum, sums);
        }
        let dtype = saved.dtype.into();
        let [dy, dsum] = [Some(dy), dsum].map(|d| d.map(|d| from(cast::<Self>(d, dtype))));
        let dy = dy.expect("dy is present");
        let grads = launch_backward(norm, saved.map(tensor::from_backend), dy, dsum, sums);
        NormInputGrads {
            x: tensor::into_backend(grads.x),
            gamma: grads.gamma.map(tensor::into_backend),
            beta: grads.beta.map(tensor::into_backend),
        }
    }
}

fn from(x: FloatTensor<Cube>) -> CubeTensor {
    tensor::from_backend(x)
}

/// Kernels compute in f32, so f64 has none.
fn has_kernel(x: &FloatTensor<Cube>) -> bool {
    x.dtype() != DType::F64
}

fn launch_forward(
    norm: Norm,
    input: NormInput<CubeTensor>,
) -> (CubeTensor, CubeTensor, SavedNorm<CubeTensor>) {
    let NormInput {
        x,
        residual,
        gamma,
        beta,
    } = input;
    let shape = x.shape();
    let dtype = x.dtype;
    let x = RowView::of(x);
    let rows = x.count;
    let n = x.len;
    let gamma = tensor::contiguous(gamma);
    let beta = beta.map(tensor::contiguous);
    let flavor = NormVariant {
        centered: norm.centered,
        zero_centered_gamma: norm.options.zero_centered_gamma,
        beta: beta.is_some(),
        add: residual.is_some(),
        stages: 0,
    };
    let residual = residual.map(RowView::of);
    let residual_stride = residual.as_ref().map_or(n, |residual| residual.stride);
    let lanes = lanes(dtype, &[n, x.stride, residual_stride]);
    let team = match RowGroup::new(n / lanes, 256, 2, 8) {
        RowGroup {
            vecs_per_thread: 0, ..
        } => RowGroup::new(n / lanes, 1024, 2, 8),
        team => team,
    };
    let y = tensor::empty(&x.tensor, shape.clone(), dtype);
    let sum = residual
        .as_ref()
        .map(|_| tensor::empty(&x.tensor, shape, dtype));
    let inverse = tensor::empty(&x.tensor, [rows, 1], DType::F32);
    let mean = norm
        .centered
        .then(|| tensor::empty(&x.tensor, [rows, 1], DType::F32));
    let beta_dtype = beta.as_ref().map(|beta| beta.dtype);
    let other = residual.map_or_else(|| x.tensor.clone(), |residual| residual.tensor);
    let dtypes = [dtype, gamma.dtype, beta_dtype.unwrap_or(gamma.dtype)];
    let launch = match team.vecs_per_thread {
        0 => long_forward_kernel::launch,
        _ => forward_kernel::launch,
    };
    let sum_or_y = sum.clone().unwrap_or_else(|| y.clone());
    let mean_or_inverse = mean.clone().unwrap_or_else(|| inverse.clone());
    // (An empty grid is not allowed.)
    if rows > 0 {
        launch(
            &y.client.clone(),
            CubeCount::Static(team.cubes(rows), 1, 1),
            team.cube_dim(),
            address_type(&[&x.tensor, &other, &y]),
            lanes,
            x.tensor.clone().into_buffer_arg(),
            other.into_buffer_arg(),
            gamma.clone().into_buffer_arg(),
            beta.unwrap_or_else(|| gamma.clone()).into_buffer_arg(),
            y.clone().into_buffer_arg(),
            sum_or_y.into_buffer_arg(),
            mean_or_inverse.into_buffer_arg(),
            inverse.clone().into_buffer_arg(),
            ForwardSizesLaunch {
                rows: rows as u32,
                width: (n / lanes) as u32,
                x_stride: (x.stride / lanes) as u32,
                residual_stride: (residual_stride / lanes) as u32,
                len: n as f32,
                epsilon: norm.options.epsilon as f32,
            },
            team,
            flavor,
            dtypes.map(dtype_to_storage_type),
        );
    }
    let sum = sum.unwrap_or(x.tensor);
    let saved = SavedNorm {
        x: sum.clone(),
        mean,
        deviation: inverse,
        gamma,
        beta: beta_dtype,
        dtype,
    };
    (y, sum, saved)
}

fn launch_backward(
    norm: Norm,
    saved: SavedNorm<CubeTensor>,
    dy: CubeTensor,
    dsum: Option<CubeTensor>,
    sums: &NormGrads,
) -> NormInputGrads<CubeTensor> {
    let SavedNorm {
        x,
        mean,
        deviation: inverse,
        gamma,
        beta,
        dtype,
    } = saved;
    let shape = dy.shape();
    let [x, dy] = [x, dy].map(RowView::of);
    let rows = x.count;
    let n = x.len;
    let add = dsum.is_some();
    let dsum = dsum.map(RowView::of);
    let dsum_stride = dsum.as_ref().map_or(n, |dsum| dsum.stride);
    let lanes = lanes(dtype, &[n, x.stride, dy.stride, dsum_stride]);
    // (The sums for two gradients need the registers of one more vector.)
    let team = RowGroup::new(n / lanes, 512, 2, if beta.is_some() { 3 } else { 4 });
    let room = dy
        .tensor
        .client
        .properties()
        .hardware
        .max_shared_memory_size;
    let shared = stage_bytes(team, if add { 3 } else { 2 });
    let flavor = NormVariant {
        centered: norm.centered,
        zero_centered_gamma: norm.options.zero_centered_gamma,
        beta: beta.is_some(),
        add,
        stages: if has_stages(&dy.tensor, lanes, team, shared) {
            STAGES
        } else {
            0
        },
    };
    let cubes = team.cubes(rows).min(resident(flavor, team, shared, room));
    let teams = cubes * team.rows;
    let dx = tensor::empty(&dy.tensor, shape, dtype);
    // Without rows one team's partial sums are still allocated; they are not read.
    let parts = || tensor::empty(&dx, [teams.max(1) as usize, n], DType::F32);
    let dgamma_parts = parts();
    let dbeta_parts = beta.map(|_| parts());
    let dsum = dsum.map_or_else(|| dy.tensor.clone(), |dsum| dsum.tensor);
    let launch = match team.vecs_per_thread {
        0 => long_backward_kernel::launch,
        _ => backward_kernel::launch,
    };
    if rows > 0 {
        launch(
            &dx.client.clone(),
            CubeCount::Static(cubes, 1, 1),
            team.cube_dim(),
            address_type(&[&x.tensor, &dy.tensor, &dsum, &dx, &dgamma_parts]),
            lanes,
            dy.tensor.into_buffer_arg(),
            x.tensor.into_buffer_arg(),
            dsum.into_buffer_arg(),
            gamma.clone().into_buffer_arg(),
            mean.unwrap_or_else(|| inverse.clone()).into_buffer_arg(),
            inverse.into_buffer_arg(),
            dx.clone().into_buffer_arg(),
            dgamma_parts.clone().into_buffer_arg(),
            dbeta_parts
                .clone()
                .unwrap_or_else(|| dgamma_parts.clone())
                .into_buffer_arg(),
            BackwardSizesLaunch {
                rows: rows as u32,
                width: (n / lanes) as u32,
                dy_stride: (dy.stride / lanes) as u32,
                x_stride: (x.stride / lanes) as u32,
                dsum_stride: (dsum_stride / lanes) as u32,
                len: n as f32,
                teams,
            },
            team,
            flavor,
            [dtype, gamma.dtype].map(dtype_to_storage_type),
        );
    }
    let for_gamma = (dgamma_parts, gamma.dtype);
    let [gamma, beta] = vector_gradients(for_gamma, dbeta_parts.zip(beta), teams, sums);
    NormInputGrads { x: dx, gamma, beta }
}

/// Bytes of shared memory of a cube with stages for `tensors` tensors, in vectors of 16 bytes.
fn stage_bytes(team: RowGroup, tensors: u32) -> usize {
    // (The sums also need shared memory, for which 1024 bytes are enough.)
    (STAGES * team.vecs_per_thread * team.cube_dim().num_elems() * 16 * tensors + 1024) as usize
}

/// Whether the backward kernel loads rows by asynchronous copies.
fn has_stages(of: &CubeTensor, lanes: usize, team: RowGroup, shared: usize) -> bool {
    let properties = of.client.properties();
    // Copies of fewer than 16 bytes do not pay off, and rows too long for registers have no stages.
    properties.features.copy_async
        && team.vecs_per_thread > 0
        && lanes * of.dtype.size() == 16
        && shared <= properties.hardware.max_shared_memory_size
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The grid has as many cubes as fit at once, limited by registers, or by shared memory for
    /// long rows.
    #[test]
    fn cubes_of_the_backward_are_as_many_as_fit() {
        const ROOM: usize = 227 << 10;
        let flavor = |beta, add| NormVariant {
            centered: beta,
            zero_centered_gamma: false,
            beta,
            add,
            stages: 3,
        };
        let cubes = |n: usize, beta, add| {
            let team = RowGroup::new(n / 8, 512, 2, if beta { 3 } else { 4 });
            let shared = stage_bytes(team, if add { 3 } else { 2 });
            resident(flavor(beta, add), team, shared, ROOM) / PROCESSORS
        };
        assert_eq!(cubes(4096, false, false), 4);
        assert_eq!(cubes(4096, false, true), 3);
        assert_eq!(cubes(4096, true, false), 2);
        assert_eq!(cubes(8192, false, true), 1, "144 KiB each");
        assert_eq!(cubes(16384, false, false), 1, "192 KiB");
    }
}
