use burn::tensor::{Bytes, DType};
use bytemuck::{Pod, try_cast_slice};

/// Concatenates parts into one buffer that is aligned for elements of `dtype`.
///
/// `Bytes::from_bytes_vec` would copy a second time: it requires memory aligned for any element
/// type, which a `Vec<u8>` does not guarantee.
pub(crate) fn joined<'a>(parts: impl Iterator<Item = &'a [u8]> + Clone, dtype: DType) -> Bytes {
    match dtype.size() {
        1 => elements::<u8>(parts),
        2 => elements::<u16>(parts),
        4 => elements::<u32>(parts),
        _ => elements::<u64>(parts),
    }
}

fn elements<'a, T: Pod + Send + Sync>(parts: impl Iterator<Item = &'a [u8]> + Clone) -> Bytes {
    let bytes: usize = parts.clone().map(<[u8]>::len).sum();
    let mut all = Vec::with_capacity(bytes / size_of::<T>());
    for part in parts {
        match try_cast_slice::<u8, T>(part) {
            Ok(part) => all.extend_from_slice(part),
            Err(_) => {
                all.extend(
                    part.chunks_exact(size_of::<T>())
                        .map(bytemuck::pod_read_unaligned::<T>),
                );
            }
        }
    }
    Bytes::from_elems(all)
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;

    use super::*;

    #[test]
    fn parts_stand_one_behind_the_other_whatever_their_alignment() {
        let bytes: Vec<u8> = (0..96).collect();
        for dtype in [DType::U8, DType::BF16, DType::F32, DType::F64] {
            for offset in 0..8 {
                let parts = [
                    &bytes[offset..offset + 16],
                    &bytes[40 + offset..48 + offset],
                    &[],
                ];
                let all = joined(parts.into_iter(), dtype);
                assert_eq!(all[..], parts.concat());
                let data = TensorData::from_bytes(all, [24 / dtype.size()], dtype);
                assert_eq!(data.as_bytes(), parts.concat());
            }
        }
    }
}
