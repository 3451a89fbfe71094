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
use super::op::{Norm, NormInput, NormInputGrads, NormRows, Normed, SavedNorm};
use super::options::NormGrads;
use crate::kernel_parts::{RowGroup, RowView, address_type, lanes};
use crate::quantized::launch::{from_bits, no_amax};
use vectors::vector_gradients;

/// Multiprocessors of a large GPU.
const PROCESSORS: u32 = 132;

/// Vectors of a row for which a unit is responsible, if there are enough units: two, so that each
/// unit has two loads of each tensor in flight.
const TARGET_VECS: usize = 2;

/// The units of a forward row, with at most 8 vectors in registers each (32 registers, as a vector
/// has 16 bytes). A cube of 256 units is small enough that other cubes run while it waits at its
/// barriers. Rows of more than 2048 vectors take up to 1024 units, the most of a cube, and rows of
/// more than 8192 vectors do not fit in registers. (`benches/results/kernels.md`: rows of 512
/// vectors run at 0.86 of the rate of a copy, or more.)
fn forward_group(vectors: usize) -> RowGroup {
    match RowGroup::new(vectors, 256, TARGET_VECS, 8) {
        RowGroup {
            vecs_per_thread: 0, ..
        } => RowGroup::new(vectors, 1024, TARGET_VECS, 8),
        group => group,
    }
}

/// The units of a backward row. With 512 units, each can have 128 of the 65,536 registers of a
/// multiprocessor; with 1024 it could have 64. In bf16, a vector takes 16 of them (4 each for `x`
/// and `dy`, 8 for the f32 sum of `dgamma`), and 24 if there is a `dbeta`: 4 vectors take 64
/// registers, and 3 with `dbeta` take 72.
fn backward_group(vectors: usize, has_beta: bool) -> RowGroup {
    RowGroup::new(vectors, 512, TARGET_VECS, if has_beta { 3 } else { 4 })
}

/// The number of backward cubes that a large GPU runs at once, limited by registers and the shared
/// memory of stages. With this grid all groups run concurrently and there are few partial sums. The
/// resident units of a multiprocessor (512, 768 or 1024) are those that were fastest in
/// `benches/results/kernels.md`.
fn resident(variant: NormVariant, group: RowGroup, shared: usize, room: usize) -> u32 {
    let units = match variant {
        NormVariant { stages: 0, .. } | NormVariant { beta: true, .. } => 512,
        NormVariant { add: true, .. } => 768,
        _ => 1024,
    };
    let by_shared = room.checked_div(shared).unwrap_or(usize::MAX).max(1);
    let by_units = (units / group.cube_dim().num_elems()).max(1);
    PROCESSORS * by_units.min(by_shared.min(32) as u32)
}

impl NormRows for Cube {
    fn normed(
        norm: Norm,
        input: NormInput<FloatTensor<Self>>,
        finds_amax: bool,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
        if !has_kernel(&input.x) {
            return fallback::normed::<Self>(norm, input, finds_amax);
        }
        let Normed { y, amax, .. } = Self::forward(norm, input, finds_amax);
        (y, amax)
    }

    fn forward(
        norm: Norm,
        input: NormInput<FloatTensor<Self>>,
        finds_amax: bool,
    ) -> Normed<FloatTensor<Self>> {
        if !has_kernel(&input.x) {
            return fallback::forward::<Self>(norm, input, finds_amax);
        }
        let normed = launch_forward(norm, input.map(tensor::from_backend), finds_amax);
        let Normed {
            y,
            sum,
            saved,
            amax,
        } = normed;
        let [y, sum] = [y, sum].map(tensor::into_backend);
        Normed {
            y,
            sum,
            saved: saved.map(tensor::into_backend),
            amax: amax.map(tensor::into_backend),
        }
    }

    fn backward(
        norm: Norm,
        saved: SavedNorm<FloatTensor<Self>>,
        dy: FloatTensor<Self>,
        dsum: Option<FloatTensor<Self>>,
        sums: &NormGrads,
        finds_amax: bool,
    ) -> NormInputGrads<FloatTensor<Self>> {
        if saved.dtype == DType::F64 {
            return fallback::backward::<Self>(norm, saved, dy, dsum, sums, finds_amax);
        }
        let dtype = saved.dtype.into();
        let [dy, dsum] = [Some(dy), dsum].map(|d| d.map(|d| from(cast::<Self>(d, dtype))));
        let dy = dy.expect("dy is present");
        let saved = saved.map(tensor::from_backend);
        let grads = launch_backward(norm, saved, dy, dsum, sums, finds_amax);
        NormInputGrads {
            x: tensor::into_backend(grads.x),
            gamma: grads.gamma.map(tensor::into_backend),
            beta: grads.beta.map(tensor::into_backend),
            amax: grads.amax.map(tensor::into_backend),
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
    finds_amax: bool,
) -> Normed<CubeTensor> {
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
    let variant = NormVariant {
        centered: norm.centered,
        zero_centered_gamma: norm.options.zero_centered_gamma,
        beta: beta.is_some(),
        add: residual.is_some(),
        observed: finds_amax,
        stages: 0,
    };
    let residual = residual.map(RowView::of);
    let residual_stride = residual.as_ref().map_or(n, |residual| residual.stride);
    let lanes = lanes(dtype, &[n, x.stride, residual_stride]);
    let group = forward_group(n / lanes);
    let y = tensor::empty(&x.tensor, shape.clone(), dtype);
    let sum = residual
        .as_ref()
        .map(|_| tensor::empty(&x.tensor, shape, dtype));
    let rstd = tensor::empty(&x.tensor, [rows, 1], DType::F32);
    let mean = norm
        .centered
        .then(|| tensor::empty(&x.tensor, [rows, 1], DType::F32));
    let beta_dtype = beta.as_ref().map(|beta| beta.dtype);
    let other = residual.map_or_else(|| x.tensor.clone(), |residual| residual.tensor);
    let dtypes = [dtype, gamma.dtype, beta_dtype.unwrap_or(gamma.dtype)];
    let launch = match group.vecs_per_thread {
        0 => long_forward_kernel::launch,
        _ => forward_kernel::launch,
    };
    let sum_or_y = sum.clone().unwrap_or_else(|| y.clone());
    let mean_or_rstd = mean.clone().unwrap_or_else(|| rstd.clone());
    let amax = finds_amax.then(|| no_amax(&y));
    // (An empty grid is not allowed.)
    if rows > 0 {
        launch(
            &y.client.clone(),
            CubeCount::Static(group.cubes(rows), 1, 1),
            group.cube_dim(),
            address_type(&[&x.tensor, &other, &y]),
            lanes,
            x.tensor.clone().into_buffer_arg(),
            other.into_buffer_arg(),
            gamma.clone().into_buffer_arg(),
            beta.unwrap_or_else(|| gamma.clone()).into_buffer_arg(),
            y.clone().into_buffer_arg(),
            sum_or_y.into_buffer_arg(),
            mean_or_rstd.into_buffer_arg(),
            rstd.clone().into_buffer_arg(),
            amax.as_ref().unwrap_or(&rstd).clone().into_buffer_arg(),
            ForwardSizesLaunch {
                rows: rows as u32,
                width: (n / lanes) as u32,
                x_stride: (x.stride / lanes) as u32,
                residual_stride: (residual_stride / lanes) as u32,
                len: n as f32,
                epsilon: norm.options.epsilon as f32,
            },
            group,
            variant,
            dtypes.map(dtype_to_storage_type),
        );
    }
    let sum = sum.unwrap_or(x.tensor);
    let saved = SavedNorm {
        x: sum.clone(),
        mean,
        std_or_rstd: rstd,
        gamma,
        beta: beta_dtype,
        dtype,
    };
    Normed {
        y,
        sum,
        saved,
        amax: amax.map(from_bits),
    }
}

fn launch_backward(
    norm: Norm,
    saved: SavedNorm<CubeTensor>,
    dy: CubeTensor,
    dsum: Option<CubeTensor>,
    sums: &NormGrads,
    finds_amax: bool,
) -> NormInputGrads<CubeTensor> {
    let SavedNorm {
        x,
        mean,
        std_or_rstd: rstd,
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
    let group = backward_group(n / lanes, beta.is_some());
    let room = dy
        .tensor
        .client
        .properties()
        .hardware
        .max_shared_memory_size;
    let shared = stage_bytes(group, if add { 3 } else { 2 });
    let variant = NormVariant {
        centered: norm.centered,
        zero_centered_gamma: norm.options.zero_centered_gamma,
        beta: beta.is_some(),
        add,
        observed: finds_amax,
        stages: if has_stages(&dy.tensor, lanes, group, shared) {
            STAGES
        } else {
            0
        },
    };
    let cubes = group
        .cubes(rows)
        .min(resident(variant, group, shared, room));
    let groups = cubes * group.rows;
    let dx = tensor::empty(&dy.tensor, shape, dtype);
    // Without rows one group's partial sums are still allocated; they are not read.
    let parts = || tensor::empty(&dx, [groups.max(1) as usize, n], DType::F32);
    let dgamma_parts = parts();
    let dbeta_parts = beta.map(|_| parts());
    let amax = finds_amax.then(|| no_amax(&dx));
    let dsum = dsum.map_or_else(|| dy.tensor.clone(), |dsum| dsum.tensor);
    let launch = match group.vecs_per_thread {
        0 => long_backward_kernel::launch,
        _ => backward_kernel::launch,
    };
    if rows > 0 {
        launch(
            &dx.client.clone(),
            CubeCount::Static(cubes, 1, 1),
            group.cube_dim(),
            address_type(&[&x.tensor, &dy.tensor, &dsum, &dx, &dgamma_parts]),
            lanes,
            dy.tensor.into_buffer_arg(),
            x.tensor.into_buffer_arg(),
            dsum.into_buffer_arg(),
            gamma.clone().into_buffer_arg(),
            mean.unwrap_or_else(|| rstd.clone()).into_buffer_arg(),
            rstd.into_buffer_arg(),
            dx.clone().into_buffer_arg(),
            dgamma_parts.clone().into_buffer_arg(),
            dbeta_parts
                .clone()
                .unwrap_or_else(|| dgamma_parts.clone())
                .into_buffer_arg(),
            amax.as_ref()
                .unwrap_or(&dgamma_parts)
                .clone()
                .into_buffer_arg(),
            BackwardSizesLaunch {
                rows: rows as u32,
                width: (n / lanes) as u32,
                dy_stride: (dy.stride / lanes) as u32,
                x_stride: (x.stride / lanes) as u32,
                dsum_stride: (dsum_stride / lanes) as u32,
                len: n as f32,
                groups,
            },
            group,
            variant,
            [dtype, gamma.dtype].map(dtype_to_storage_type),
        );
    }
    let dgamma_parts = (dgamma_parts, gamma.dtype);
    let [gamma, beta] = vector_gradients(dgamma_parts, dbeta_parts.zip(beta), groups, sums);
    NormInputGrads {
        x: dx,
        gamma,
        beta,
        amax: amax.map(from_bits),
    }
}

/// Bytes of shared memory of a cube with stages for `tensors` tensors, in vectors of 16 bytes.
fn stage_bytes(group: RowGroup, tensors: u32) -> usize {
    // (The sums also need shared memory, for which 1024 bytes are enough.)
    (STAGES * group.vecs_per_thread * group.cube_dim().num_elems() * 16 * tensors + 1024) as usize
}

/// Whether the backward kernel loads rows by asynchronous copies.
fn has_stages(of: &CubeTensor, lanes: usize, group: RowGroup, shared: usize) -> bool {
    let properties = of.client.properties();
    // Copies of fewer than 16 bytes do not pay off, and rows too long for registers have no stages.
    properties.features.copy_async
        && group.vecs_per_thread > 0
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
        let variant = |beta, add| NormVariant {
            centered: beta,
            zero_centered_gamma: false,
            beta,
            add,
            observed: false,
            stages: 3,
        };
        let cubes = |n: usize, beta, add| {
            let group = backward_group(n / 8, beta);
            let shared = stage_bytes(group, if add { 3 } else { 2 });
            resident(variant(beta, add), group, shared, ROOM) / PROCESSORS
        };
        assert_eq!(cubes(4096, false, false), 4);
        assert_eq!(cubes(4096, false, true), 3);
        assert_eq!(cubes(4096, true, false), 2);
        assert_eq!(cubes(8192, false, true), 1, "144 KiB each");
        assert_eq!(cubes(16384, false, false), 1, "192 KiB");
    }
}
