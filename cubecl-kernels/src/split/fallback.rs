//! Copies to contiguous memory on CPUs.

use burn::backend::Flex;
#[cfg(feature = "ndarray")]
use burn::backend::NdArray;
use burn::backend::tensor::FloatTensor;

use super::op::Assembly;

impl Assembly for Flex {
    fn compact(x: FloatTensor<Self>) -> FloatTensor<Self> {
        x.to_contiguous()
    }
}

#[cfg(feature = "ndarray")]
impl Assembly for NdArray {
    fn compact(x: FloatTensor<Self>) -> FloatTensor<Self> {
        x
    }
}

#[cfg(all(feature = "wgpu", not(feature = "cuda")))]
impl Assembly for burn::backend::Cube {
    fn compact(x: FloatTensor<Self>) -> FloatTensor<Self> {
        x
    }
}
