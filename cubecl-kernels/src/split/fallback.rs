//! Copies to contiguous memory on CPUs.

use burn::backend::tensor::FloatTensor;

use super::op::Assembly;

#[cfg(feature = "flex")]
impl Assembly for burn::backend::Flex {
    fn compact(x: FloatTensor<Self>) -> FloatTensor<Self> {
        x.to_contiguous()
    }
}
