//! Copies to contiguous memory on CPUs.

use burn::backend::Flex;
use burn::backend::tensor::FloatTensor;
use megaburn_autograd::on_optional_backends;

use super::op::Assembly;

impl Assembly for Flex {
    fn compact(x: FloatTensor<Self>) -> FloatTensor<Self> {
        x.to_contiguous()
    }
}

on_optional_backends! {
    impl Assembly {
        fn compact(x: FloatTensor<Self>) -> FloatTensor<Self> {
            x
        }
    }
}
