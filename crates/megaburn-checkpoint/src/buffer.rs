//! Memory that becomes a tensor without a copy.

use burn::tensor::{Bytes, DType, TensorData};
use bytemuck::Pod;

/// A tensor of zeros that `fill` then writes.
///
/// `TensorData::from_bytes_vec` would copy, because it requires memory aligned for any element
/// type, which a `Vec<u8>` does not guarantee. This memory is aligned for the tensor's own element
/// type.
pub(crate) fn filled<E>(
    shape: Vec<usize>,
    dtype: DType,
    fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
) -> Result<TensorData, E> {
    let len = shape.iter().product();
    let bytes = match dtype.size() {
        1 => elements::<u8, E>(len, fill),
        2 => elements::<u16, E>(len, fill),
        4 => elements::<u32, E>(len, fill),
        _ => elements::<u64, E>(len, fill),
    };
    Ok(TensorData::from_bytes(bytes?, shape, dtype))
}

fn elements<T: Pod + Send + Sync, E>(
    len: usize,
    fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
) -> Result<Bytes, E> {
    let mut memory = vec![T::zeroed(); len];
    fill(bytemuck::cast_slice_mut(&mut memory))?;
    Ok(Bytes::from_elems(memory))
}
