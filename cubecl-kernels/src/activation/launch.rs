//! Activation kernels' launches on CubeCL GPU backends.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_autograd::backend_ops::cast;
use megaburn_cuda::tensor;

use super::fallback;
use super::kernels::{self, *};
use super::op::{Activate, Activation, ActivationGrads, ActivationInput};
use crate::kernel_parts::{RowGroup, RowView, address_type, lanes};
use crate::quantized::launch::{from_bits, no_amax};

/// Units per cube of the elementwise kernels.
const UNITS: usize = kernels::UNITS as usize;
/// Most units per row when the weight's gradient is computed, which takes one sum per row.
const ROW_UNITS: u32 = 256;
/// Target cube count for the bias gradient: several per multiprocessor of a large GPU.
const CUBES: usize = 132 * 4;
/// Rows that a unit of the bias-gradient kernel loads at once.
const AHEAD: u32 = 4;

impl Activate for Cube {
    fn forward(
        activation: Activation,
        input: ActivationInput<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        if input.x.dtype() == DType::F64 {
            return fallback::forward::<Self>(activation, input);
        }
        let input = input.map(tensor::from_backend);
        tensor::into_backend(launch_forward(activation, input, None))
    }

    fn forward_observed(activation: Activation, x: FloatTensor<Self>) -> [FloatTensor<Self>; 2] {
        let x = tensor::from_backend(x);
        let amax = no_amax(&x);
        let y = launch_forward(activation, x.into(), Some(&amax));
        [y, from_bits(amax)].map(tensor::into_backend)
    }

    fn backward_observed(
        activation: Activation,
        x: FloatTensor<Self>,
        dy: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 2] {
        let dy = tensor::from_backend(cast::<Self>(dy, x.dtype().into()));
        let x = tensor::from_backend(x);
        let amax = no_amax(&x);
        let grads = launch_backward(activation, x.into(), dy, Some(&amax));
        [grads.x, from_bits(amax)].map(tensor::into_backend)
    }

    fn backward(
        activation: Activation,
        input: ActivationInput<FloatTensor<Self>>,
        dy: FloatTensor<Self>,
    ) -> ActivationGrads<FloatTensor<Self>> {
        if input.x.dtype() == DType::F64 {
            return fallback::backward::<Self>(activation, input, dy);
        }
        let dy = tensor::from_backend(cast::<Self>(dy, input.x.dtype().into()));
        let grads = launch_backward(activation, input.map(tensor::from_backend), dy, None);
        ActivationGrads {
            x: tensor::into_backend(grads.x),
            bias: grads.bias.map(tensor::into_backend),
            weight: grads.weight.map(tensor::into_backend),
        }
    }
}

impl<T> ActivationInput<T> {
    fn map<U>(self, mut f: impl FnMut(T) -> U) -> ActivationInput<U> {
        let Self { x, bias, weight } = self;
        ActivationInput {
            x: f(x),
            bias: bias.map(&mut f),
            weight: weight.map(f),
        }
    }
}

/// With `amax`, for inputs without weights and biases, it is raised to the bits of the result's
/// largest magnitude.
fn launch_forward(
    activation: Activation,
    input: ActivationInput<CubeTensor>,
    amax: Option<&CubeTensor>,
) -> CubeTensor {
    let ActivationInput { x, bias, weight } = input;
    let dtype = x.dtype;
    let mut shape: Shape = x.shape();
    if activation.gated {
        let last = shape.num_dims() - 1;
        shape[last] /= 2;
    }
    let len = shape[shape.num_dims() - 1];
    let y = tensor::empty(&x, shape, dtype);
    let elements = y.meta.num_elements();
    if elements == 0 {
        return y;
    }
    let x = RowView::of(x);
    let lanes = lanes(dtype, &[len, x.stride]);
    let [bias, weight] = [bias, weight].map(|t| t.map(tensor::contiguous));
    let biased = bias.is_some();
    let weighted = weight.is_some();
    let factor = weight
        .or_else(|| bias.clone())
        .unwrap_or_else(|| x.tensor.clone());
    let dtypes = [dtype, factor.dtype].map(dtype_to_storage_type);
    forward_kernel::launch(
        &y.client.clone(),
        CubeCount::Static((elements / lanes).div_ceil(UNITS) as u32, 1, 1),
        CubeDim::new_1d(UNITS as u32),
        address_type(&[&x.tensor, &y]),
        lanes,
        x.tensor.into_buffer_arg(),
        bias.unwrap_or_else(|| factor.clone()).into_buffer_arg(),
        factor.into_buffer_arg(),
        y.clone().into_buffer_arg(),
        amax.unwrap_or(&y).clone().into_buffer_arg(),
        elements / lanes,
        (len / lanes) as u32,
        (x.stride / lanes) as u32,
        activation,
        amax.is_some(),
        biased,
        weighted,
        dtypes,
    );
    y
}

/// With `amax`, as [`launch_forward`], it is raised to that of the gradient of `x`.
fn launch_backward(
    activation: Activation,
    input: ActivationInput<CubeTensor>,
    dy: CubeTensor,
    amax: Option<&CubeTensor>,
) -> ActivationGrads<CubeTensor> {
    let ActivationInput { x, bias, weight } = input;
    let dtype = x.dtype;
    let dx = tensor::empty(&x, x.shape(), dtype);
    let [bias, weight] = [bias, weight].map(|t| t.map(tensor::contiguous));
    let [x, dy] = [x, dy].map(RowView::of);
    let rows = dy.count;
    let len = dy.len;
    let lanes = lanes(dtype, &[len, x.stride, dy.stride]);
    let address = address_type(&[&x.tensor, &dy.tensor, &dx]);
    let client = dx.client.clone();
    let [width, x_stride, dy_stride] = [len, x.stride, dy.stride].map(|n| (n / lanes) as u32);
    let mut dbias = None;
    let mut dweight = None;
    if let Some(bias) = bias {
        let columns = (width as usize).div_ceil(UNITS).max(1);
        let parts = (CUBES / columns).clamp(1, rows.div_ceil(AHEAD as usize).max(1));
        let sums = tensor::empty(&dx, [parts, len], DType::F32);
        let dtype_of_bias = bias.dtype;
        biased_backward_kernel::launch(
            &client,
            CubeCount::Static(columns as u32, parts as u32, 1),
            CubeDim::new_1d(UNITS as u32),
            address,
            lanes,
            x.tensor.into_buffer_arg(),
            bias.into_buffer_arg(),
            dy.tensor.into_buffer_arg(),
            dx.clone().into_buffer_arg(),
            sums.clone().into_buffer_arg(),
            rows as u32,
            width,
            x_stride,
            dy_stride,
            parts as u32,
            activation,
            AHEAD,
            [dtype, dtype_of_bias].map(dtype_to_storage_type),
        );
        dbias = Some(sums);
    } else if let Some(weight) = weight {
        let sums = tensor::empty(&weight, weight.shape(), weight.dtype);
        let group = RowGroup::new(width as usize, ROW_UNITS, 1, usize::MAX);
        let dtypes = [dtype, weight.dtype].map(dtype_to_storage_type);
        if rows > 0 {
            weighted_backward_kernel::launch(
                &client,
                CubeCount::Static(group.cubes(rows), 1, 1),
                group.cube_dim(),
                address,
                lanes,
                x.tensor.into_buffer_arg(),
                weight.into_buffer_arg(),
                dy.tensor.into_buffer_arg(),
                dx.clone().into_buffer_arg(),
                sums.clone().into_buffer_arg(),
                rows as u32,
                width,
                x_stride,
                dy_stride,
                activation,
                RowGroup {
                    vecs_per_thread: 0,
                    ..group
                },
                dtypes,
            );
        }
        dweight = Some(sums);
    } else if rows > 0 {
        let vectors = rows * width as usize;
        backward_kernel::launch(
            &client,
            CubeCount::Static(vectors.div_ceil(UNITS) as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            address,
            lanes,
            x.tensor.into_buffer_arg(),
            dy.tensor.into_buffer_arg(),
            dx.clone().into_buffer_arg(),
            amax.unwrap_or(&dx).clone().into_buffer_arg(),
            vectors,
            width,
            x_stride,
            dy_stride,
            activation,
            amax.is_some(),
            dtype_to_storage_type(dtype),
        );
    }
    ActivationGrads {
        x: dx,
        bias: dbias,
        weight: dweight,
    }
}
