//! Reads tensors of CPUs without a copy.

use std::{ops::Range, sync::Arc};

use burn::{
    Tensor,
    backend::Flex,
    tensor::{AllocationProperty, Bytes, TensorData},
};

/// A part of a tensor's memory. While it exists, an operation that would change the tensor in place
/// writes to new memory instead.
struct SharedMemory {
    memory: Arc<Bytes>,
    part: Range<usize>,
}

impl AsRef<[u8]> for SharedMemory {
    fn as_ref(&self) -> &[u8] {
        &self.memory[self.part.clone()]
    }
}

/// The values of a tensor of a CPU, in its own memory. `None` on other devices, and if the elements
/// are not next to each other.
///
/// # Shapes
/// `[elements]`
pub(super) fn values_in_place(tensor: Tensor<1>) -> Option<TensorData> {
    let tensor = tensor.try_into_primitive::<Flex>().ok()?;
    if !tensor.is_contiguous() {
        return None;
    }
    let (dtype, layout) = (tensor.dtype(), tensor.layout());
    let len = layout.num_elements();
    let start = layout.start_offset() * dtype.size();
    let memory = SharedMemory {
        memory: tensor.data_arc(),
        part: start..start + len * dtype.size(),
    };
    let values = bytes::Bytes::from_owner(memory);
    let values = Bytes::from_shared(values, AllocationProperty::Native);
    Some(TensorData::from_bytes(values, [len], dtype))
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, Distribution};
    use rstest::rstest;

    use super::*;

    #[rstest]
    fn values_are_in_the_tensors_memory_and_do_not_change_with_it(
        #[values(DType::F32, DType::BF16)] dtype: DType,
        #[values((0, 7), (3, 4), (5, 1000), (0, 1005))] (start, len): (usize, usize),
    ) {
        let normal = Distribution::Normal(0.0, 1.0);
        let whole = Tensor::<1>::random([1005], normal, &Device::default()).cast(dtype);
        let expected = whole.clone().into_data();
        let size = dtype.size();
        let expected = &expected.as_bytes()[start * size..(start + len) * size];
        let memory = whole.clone().try_into_primitive::<Flex>().unwrap();
        let at = memory.bytes()[start * size..].as_ptr();
        drop(memory);
        let values = values_in_place(whole.clone().narrow(0, start, len)).unwrap();
        assert_eq!((values.dtype(), values.num_elements()), (dtype, len));
        assert_eq!(values.as_bytes().as_ptr(), at, "they are not copied");
        let changed = whole.mul_scalar(2.0).add_scalar(1.0);
        assert!(values.as_bytes() == expected);
        drop(changed);
        // A change of the values copies them.
        let mut copy = values.clone().into_bytes();
        copy[0] ^= 1;
        assert!(values.as_bytes() == expected && copy[..] != *expected);
    }
}
