//! A rank's part of a full tensor in host memory or in a file.

use burn::tensor::{Bytes, DType, TensorData};
use megaburn_mesh::ShardSpec;

/// Copies a rank's part out of the bytes of the full tensor, with zeros as padding. Of bytes that
/// are still in a file, only the part is read where it is one range of them.
pub(crate) fn part(full: Bytes, dtype: DType, spec: &ShardSpec) -> TensorData {
    let shape = spec.local_shape();
    let size = dtype.size();
    let mut runs = Vec::new();
    for piece in &spec.pieces {
        spec.for_each_run(piece, |local, global, len| {
            if len > 0 {
                runs.push((local * size, global * size, len * size));
            }
        });
    }
    let mut local = vec![0; shape.iter().product::<usize>() * size];
    if let [(at, start, len)] = runs[..]
        && let Ok(view) = full.view(start, start + len)
    {
        local[at..at + len].copy_from_slice(&view);
        return TensorData::from_bytes_vec(local, shape, dtype);
    }
    let full: &[u8] = &full;
    for (at, start, len) in runs {
        local[at..at + len].copy_from_slice(&full[start..start + len]);
    }
    TensorData::from_bytes_vec(local, shape, dtype)
}

/// The part of the transposed matrix.
pub(crate) fn transposed_spec(spec: &ShardSpec) -> ShardSpec {
    let mut transposed = spec.clone();
    transposed.global_shape.reverse();
    transposed.dim = 1 - spec.dim;
    transposed
}

/// The transposed matrix.
pub(crate) fn transposed(data: TensorData) -> TensorData {
    let (rows, columns) = (data.shape()[0], data.shape()[1]);
    let dtype = data.dtype();
    let size = dtype.size();
    let from = data.as_bytes();
    let mut bytes = vec![0; from.len()];
    for row in 0..rows {
        for column in 0..columns {
            let at = (column * rows + row) * size;
            let start = (row * columns + column) * size;
            bytes[at..at + size].copy_from_slice(&from[start..start + size]);
        }
    }
    TensorData::from_bytes_vec(bytes, [columns, rows], dtype)
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;
    use megaburn_mesh::{Axis, FusedPart};
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::columns(1, vec![0., 1., 3., 4., 6., 7.], vec![2., 5., 8.])]
    #[case::rows(0, vec![0., 1., 2., 3., 4., 5.], vec![6., 7., 8.])]
    fn parts_of_a_ragged_matrix(
        #[case] dim: usize,
        #[case] first: Vec<f32>,
        #[case] second: Vec<f32>,
    ) {
        // The second of two ranks holds one row or column, and one of padding.
        let full = TensorData::new((0..9).map(|x| x as f32).collect::<Vec<_>>(), [3, 3]);
        for (rank, held) in [first, second].into_iter().enumerate() {
            let spec = ShardSpec::split_padded(&[3, 3], dim, 4, Axis::Tp, rank, 2).unwrap();
            let local = part(full.clone().into_bytes(), DType::F32, &spec);
            assert_eq!(local.shape().to_vec(), spec.local_shape());
            let values: Vec<f32> = local.iter().collect();
            let of_held: Vec<f32> = match dim {
                0 => values[..held.len()].to_vec(),
                _ => values
                    .chunks(2)
                    .flat_map(|row| row[..held.len() / 3].to_vec())
                    .collect(),
            };
            assert_eq!(of_held, held, "rank {rank}");
            // Of the transposed matrix it is the transposed part.
            let other = part(
                transposed(full.clone()).into_bytes(),
                DType::F32,
                &transposed_spec(&spec),
            );
            assert_eq!(transposed(other), local);
        }
    }

    #[test]
    fn parts_with_copies_are_taken_in_local_order() {
        let full = TensorData::new((0..6).collect::<Vec<i64>>(), [6]);
        let parts = [FusedPart::new(4), FusedPart::units(1, 2)];
        let spec = ShardSpec::split(&[6], 0, &parts, Axis::Tp, 1, 2).unwrap();
        let local = part(full.into_bytes(), DType::I64, &spec);
        assert_eq!(local, TensorData::from([2i64, 3, 4, 5]));
    }
}
