use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::AddressType;
use megaburn_cuda::tensor;

/// A tensor as rows of its last dimension, at a constant stride in memory.
pub(crate) struct RowView {
    pub(crate) tensor: CubeTensor,
    /// The number of rows.
    pub(crate) count: usize,
    /// The elements of a row.
    pub(crate) len: usize,
    /// The elements from the start of one row to the next.
    pub(crate) stride: usize,
}

impl RowView {
    /// Uses the tensor in place (pitched, or a slice), or copies it if no single stride describes
    /// it.
    pub(crate) fn of(tensor: CubeTensor) -> Self {
        let row_stride = |tensor: &CubeTensor| {
            if tensor.meta.is_tiled() {
                None
            } else {
                row_stride(tensor.meta.shape(), tensor.meta.strides())
            }
        };
        let (tensor, stride) = match row_stride(&tensor) {
            Some(stride) => (tensor, stride),
            None => {
                let tensor = tensor::contiguous(tensor);
                let stride = row_stride(&tensor).expect(
                    "a contiguous tensor has a constant row \
                    stride",
                );
                (tensor, stride)
            }
        };
        let shape = tensor.meta.shape();
        let len = shape[shape.num_dims() - 1];
        let elements = shape.num_elements();
        let count = elements.checked_div(len).unwrap_or(0);
        Self {
            tensor,
            count,
            len,
            stride,
        }
    }
}

/// The elements from one row of the last dimension to the next, if that stride is constant.
fn row_stride(shape: &[usize], strides: &[usize]) -> Option<usize> {
    let last = shape.len() - 1;
    if shape[last] != 1 && strides[last] != 1 {
        return None;
    }
    let mut found: Option<usize> = None;
    let mut rows = 1;
    for (&size, &stride) in shape[..last].iter().zip(strides).rev() {
        if size == 1 {
            continue;
        }
        match found {
            None => found = Some(stride),
            Some(found) if stride != found * rows => return None,
            Some(_) => {}
        }
        rows *= size;
    }
    Some(found.unwrap_or(shape[last]))
}

/// The vector width in elements: at most 16 bytes, and a divisor of all row lengths and strides in
/// `lens`.
pub(crate) fn lanes(dtype: DType, lens: &[usize]) -> usize {
    let mut lanes = 16 / dtype.size();
    while !lens.iter().all(|len| len.is_multiple_of(lanes)) {
        lanes /= 2;
    }
    lanes
}

/// The index width that reaches every element of the tensors.
pub(crate) fn address_type(tensors: &[&CubeTensor]) -> AddressType {
    let types = tensors.iter().map(|tensor| tensor.required_address_type());
    types.max().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_found_in_pitched_tensors_and_slices() {
        for (shape, strides, expected) in [
            (&[3, 2, 5][..], &[10, 5, 1][..], Some(5)),
            (&[3, 2, 5], &[16, 8, 1], Some(8)),
            (&[3, 1, 5], &[16, 77, 1], Some(16)),
            (&[3, 2, 5], &[20, 8, 1], None),
            (&[2, 3, 5], &[5, 10, 1], None),
            (&[3, 5], &[1, 3], None),
            (&[4, 1], &[3, 9], Some(3)),
            (&[5], &[1], Some(5)),
        ] {
            assert_eq!(
                row_stride(shape, strides),
                expected,
                "{shape:?} {strides:?}"
            );
        }
    }

    #[test]
    fn vectors_have_sixteen_bytes_or_the_power_of_two_that_divides() {
        assert_eq!(lanes(DType::BF16, &[4096]), 8);
        assert_eq!(lanes(DType::F32, &[4096]), 4);
        assert_eq!(lanes(DType::BF16, &[4096, 12]), 4);
        assert_eq!(lanes(DType::F16, &[66]), 2);
        assert_eq!(lanes(DType::F32, &[67]), 1);
    }
}
