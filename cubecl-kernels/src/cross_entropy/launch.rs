//! The steps on CubeCL's GPUs: launches of the kernels.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{DType, FloatDType};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_autograd::backend_ops::cast;
use megaburn_cuda::tensor;

use super::kernels::{
    CombineArgsLaunch, MAX_PLANES, PLANE, READS, VocabPartLaunch, combine_kernel, gradient_kernel,
    statistics_kernel,
};
use super::op::VocabParallelLoss;
use super::options::CrossEntropyOptions;
use crate::kernel_parts::address_type;

/// Units of a cube in which each unit has its own row.
const UNITS: usize = 256;

impl VocabParallelLoss for Cube {
    fn statistics(
        logits: FloatTensor<Self>,
        labels: IntTensor<Self>,
        options: CrossEntropyOptions,
    ) -> FloatTensor<Self> {
        let (logits, view) = Rows::of(tensor::from_backend(logits));
        let labels = tensor::contiguous(tensor::from_backend(labels));
        let out = tensor::empty(&logits, [1, 4, view.rows], DType::F32);
        let lanes = view.lanes(&logits);
        let planes = planes(view.columns / lanes);
        statistics_kernel::launch(
            &logits.client.clone(),
            CubeCount::Static(view.rows as u32, 1, 1),
            CubeDim::new_2d(PLANE as u32, planes as u32),
            address_type(&[&logits]),
            lanes,
            logits.clone().into_buffer_arg(),
            labels.clone().into_buffer_arg(),
            out.clone().into_buffer_arg(),
            view.part(lanes, options),
            planes,
            options.smoothing > 0.0,
            [logits.dtype, labels.dtype].map(dtype_to_storage_type),
        );
        tensor::into_backend(out)
    }

    fn combined(
        statistics: FloatTensor<Self>,
        labels: IntTensor<Self>,
        columns: usize,
        options: CrossEntropyOptions,
    ) -> FloatTensor<Self> {
        let statistics = tensor::contiguous(tensor::from_backend(statistics));
        let labels = tensor::contiguous(tensor::from_backend(labels));
        let [parts, _, rows] = statistics.shape().dims();
        let out = tensor::empty(&statistics, [3, rows], DType::F32);
        let dtype = dtype_to_storage_type(labels.dtype);
        combine_kernel::launch(
            &statistics.client.clone(),
            CubeCount::Static(rows.div_ceil(UNITS) as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            statistics.into_buffer_arg(),
            labels.into_buffer_arg(),
            out.clone().into_buffer_arg(),
            CombineArgsLaunch {
                rows,
                parts: parts as u32,
                columns: columns as u32,
                vocab: options.vocab as u32,
                ignored: options.ignore_index as i32,
                on_target: options.on_target() as f32,
                on_each: options.on_each() as f32,
                z_loss: options.z_loss as f32,
            },
            options.smoothing > 0.0,
            dtype,
        );
        tensor::into_backend(out)
    }

    fn logit_gradient(
        logits: FloatTensor<Self>,
        labels: IntTensor<Self>,
        rows: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        options: CrossEntropyOptions,
    ) -> FloatTensor<Self> {
        let (logits, view) = Rows::of(tensor::from_backend(logits));
        let [labels, rows] =
            [tensor::from_backend(labels), tensor::from_backend(rows)].map(tensor::contiguous);
        let grad = cast::<Self>(grad, FloatDType::F32);
        let grad = tensor::contiguous(tensor::from_backend(grad));
        let lanes = view.lanes(&logits);
        let vectors = view.columns / lanes;
        let planes = planes(vectors);
        let client = logits.client.clone();
        let dtypes = [logits.dtype, labels.dtype].map(dtype_to_storage_type);
        // CubeCL wants each buffer once: an output in place is an alias of the first argument.
        let (out, out_arg, stride) = if logits.can_mut() {
            (logits.clone(), logits.as_tensor_alias(0), view.stride)
        } else {
            let out = tensor::empty(&logits, logits.shape(), logits.dtype);
            (out.clone(), out.into_tensor_arg(), view.columns)
        };
        gradient_kernel::launch(
            &client,
            CubeCount::Static(view.rows as u32, 1, 1),
            CubeDim::new_2d(PLANE as u32, planes as u32),
            address_type(&[&logits]),
            lanes,
            logits.into_buffer_arg(),
            labels.into_buffer_arg(),
            rows.into_buffer_arg(),
            grad.into_buffer_arg(),
            out_arg.into_buffer_arg(),
            view.part(lanes, options),
            (stride / lanes) as u32,
            vectors as u32,
            options.on_target() as f32,
            options.on_each() as f32,
            options.z_loss as f32,
            planes,
            dtypes,
        );
        tensor::into_backend(out)
    }
}

/// How the rows of logits lie in memory, in elements.
struct Rows {
    rows: usize,
    columns: usize,
    /// From the start of one row to the next.
    stride: usize,
}

impl Rows {
    /// Uses the logits in place if their rows have a constant stride, and a copy otherwise.
    ///
    /// # Panics
    /// If the logits are f64, which the GPU kernels do not support.
    fn of(logits: CubeTensor) -> (CubeTensor, Self) {
        assert!(
            matches!(logits.dtype, DType::F32 | DType::F16 | DType::BF16),
            "cross_entropy: {} logits are not supported on a GPU",
            logits.dtype.name()
        );
        let [s, b, columns] = logits.shape().dims();
        let found = match logits.meta.strides()[..] {
            [by_position, by_row, 1] => match (s, b) {
                (1, 1) => Some(columns),
                (_, 1) => Some(by_position),
                _ if s == 1 || by_position == b * by_row => Some(by_row),
                _ => None,
            },
            _ => None,
        };
        match found {
            Some(stride) if stride >= columns => (
                logits,
                Self {
                    rows: s * b,
                    columns,
                    stride,
                },
            ),
            _ => (
                tensor::contiguous(logits),
                Self {
                    rows: s * b,
                    columns,
                    stride: columns,
                },
            ),
        }
    }

    /// The vector width in elements: at most 16 bytes, and aligned in every row.
    fn lanes(&self, logits: &CubeTensor) -> usize {
        let size = logits.dtype.size();
        let start = logits.handle.offset_start.unwrap_or(0) as usize / size;
        let fits = |lanes: &usize| {
            [start, self.columns, self.stride]
                .iter()
                .all(|len| len.is_multiple_of(*lanes))
        };
        [16 / size, 8 / size, 4 / size]
            .into_iter()
            .find(fits)
            .unwrap_or(1)
    }

    fn part(&self, lanes: usize, options: CrossEntropyOptions) -> VocabPartLaunch {
        VocabPartLaunch {
            stride: (self.stride / lanes) as u32,
            tokens: options.tokens_of(options.part, self.columns) as u32,
            first: options.first(self.columns) as i32,
            ignored: options.ignore_index as i32,
        }
    }
}

/// Planes of a cube for a row of `vectors` vectors.
fn planes(vectors: usize) -> usize {
    vectors
        .div_ceil(READS * PLANE)
        .next_power_of_two()
        .min(MAX_PLANES)
}
