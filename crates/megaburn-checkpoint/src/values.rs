//! Reads the elements of a tensor as f64.

use burn::tensor::DType;

use crate::cast;

/// Number of elements that are converted at once.
pub(crate) const BATCH: usize = 1 << 16;

/// Calls `visit` with the elements of a tensor, given as bytes, in batches of at most [`BATCH`].
/// Integers beyond 2^53 are rounded to nearest.
pub(crate) fn for_each_batch(dtype: DType, bytes: &[u8], mut visit: impl FnMut(&[f64])) {
    let size = dtype.size();
    let mut values = vec![0.0; BATCH.min(bytes.len() / size)];
    for batch in bytes.chunks(BATCH * size) {
        let values = &mut values[..batch.len() / size];
        convert(dtype, batch, values);
        visit(values);
    }
}

/// Converts elements to f64; `values` has their number.
pub(crate) fn convert(dtype: DType, bytes: &[u8], values: &mut [f64]) {
    if let Some(copy) = cast::copy(dtype, DType::F64) {
        return copy(bytes, bytemuck::cast_slice_mut(values));
    }
    match dtype {
        DType::I64 => each(bytes, values, |x| i64::from_le_bytes(x) as f64),
        DType::I32 => each(bytes, values, |x| i32::from_le_bytes(x).into()),
        DType::I16 => each(bytes, values, |x| i16::from_le_bytes(x).into()),
        DType::I8 => each(bytes, values, |x| i8::from_le_bytes(x).into()),
        DType::U64 => each(bytes, values, |x| u64::from_le_bytes(x) as f64),
        DType::U32 => each(bytes, values, |x| u32::from_le_bytes(x).into()),
        DType::U16 => each(bytes, values, |x| u16::from_le_bytes(x).into()),
        DType::U8 | DType::Bool(_) => each(bytes, values, |[x]| x.into()),
        other => unreachable!("files have no tensors of {other:?}"),
    }
}

fn each<const N: usize>(bytes: &[u8], values: &mut [f64], load: impl Fn([u8; N]) -> f64) {
    for (from, to) in bytes.as_chunks().0.iter().zip(values) {
        *to = load(*from);
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{bf16, f16};

    use super::*;

    fn read(dtype: DType, bytes: &[u8]) -> Vec<f64> {
        let mut all = Vec::new();
        for_each_batch(dtype, bytes, |values| {
            assert!(values.len() <= BATCH);
            all.extend_from_slice(values);
        });
        all
    }

    #[test]
    fn elements_of_every_type_keep_their_values_and_order() {
        let count = BATCH + 3;
        let bytes: Vec<u8> = (0..count).map(|i| (i * 7) as u8).collect();
        let signed = bytes.iter().map(|x| f64::from(*x as i8));
        assert_eq!(read(DType::I8, &bytes), signed.collect::<Vec<_>>());
        assert_eq!(read(DType::U8, &bytes).len(), count);
        let small = [-3i16, 0, 500];
        let wide = |f: fn(i16) -> Vec<u8>| small.iter().flat_map(|x| f(*x)).collect::<Vec<u8>>();
        let expected = [-3.0, 0.0, 500.0];
        let of_i16 = wide(|x| x.to_le_bytes().to_vec());
        let of_i32 = wide(|x| i32::from(x).to_le_bytes().to_vec());
        let of_i64 = wide(|x| i64::from(x).to_le_bytes().to_vec());
        let of_f16 = wide(|x| f16::from_f32(x.into()).to_le_bytes().to_vec());
        let of_bf16 = wide(|x| bf16::from_f32(x.into()).to_le_bytes().to_vec());
        let of_f32 = wide(|x| f32::from(x).to_le_bytes().to_vec());
        let of_f64 = wide(|x| f64::from(x).to_le_bytes().to_vec());
        for (dtype, bytes) in [
            (DType::I16, of_i16),
            (DType::I32, of_i32),
            (DType::I64, of_i64),
            (DType::F16, of_f16),
            (DType::BF16, of_bf16),
            (DType::F32, of_f32),
            (DType::F64, of_f64),
        ] {
            assert_eq!(read(dtype, &bytes), expected, "{dtype:?}");
        }
        assert_eq!(read(DType::U16, &65535u16.to_le_bytes()), [65535.0]);
        assert_eq!(read(DType::U32, &u32::MAX.to_le_bytes()), [4_294_967_295.0]);
        assert_eq!(
            read(DType::U64, &(1u64 << 63).to_le_bytes()),
            [2f64.powi(63)]
        );
        assert!(read(DType::F32, &[]).is_empty());
    }
}
