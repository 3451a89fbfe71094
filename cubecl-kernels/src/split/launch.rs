//! Copies to contiguous memory on CubeCL GPU backends, by Burn's kernel, and the assembly of a gradient
//! whose largest magnitude is found.

use burn::backend::Cube;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::tensor::FloatTensor;
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use super::kernels::{UNITS, put_part_kernel};
use super::op::{Assembly, joined_shape};
use crate::kernel_parts::{address_type, lanes};
use crate::quantized::launch::{from_bits, no_amax};

impl Assembly for Cube {
    fn compact(x: FloatTensor<Self>) -> FloatTensor<Self> {
        tensor::into_backend(tensor::contiguous(tensor::from_backend(x)))
    }

    fn joined_observed(parts: Vec<FloatTensor<Self>>, dim: usize) -> [FloatTensor<Self>; 2] {
        let shape = joined_shape::<Self>(&parts, dim);
        let parts = parts.into_iter().map(tensor::from_backend);
        let parts: Vec<_> = parts.map(tensor::contiguous).collect();
        let whole = tensor::empty(&parts[0], shape.clone(), parts[0].dtype);
        let amax = no_amax(&whole);
        // From one index of the dimensions before `dim` to the next.
        let distance = |shape: &[usize]| shape[dim..].iter().product::<usize>();
        let stride = distance(&shape);
        let mut first = 0;
        for part in parts {
            let width = distance(part.meta.shape());
            let lanes = lanes(part.dtype, &[width, stride, first]);
            let vectors = part.meta.num_elements() / lanes;
            if vectors > 0 {
                put_part_kernel::launch(
                    &whole.client.clone(),
                    CubeCount::Static(vectors.div_ceil(UNITS as usize) as u32, 1, 1),
                    CubeDim::new_1d(UNITS),
                    address_type(&[&part, &whole]),
                    lanes,
                    part.clone().into_buffer_arg(),
                    whole.clone().into_buffer_arg(),
                    amax.clone().into_buffer_arg(),
                    vectors,
                    width / lanes,
                    stride / lanes,
                    first / lanes,
                    dtype_to_storage_type(part.dtype),
                );
            }
            first += width;
        }
        [whole, from_bits(amax)].map(tensor::into_backend)
    }
}
