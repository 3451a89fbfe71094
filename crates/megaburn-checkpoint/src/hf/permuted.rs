//! Reads a tensor whose columns are in another order than a parameter's, one by one.

use std::ops::Range;

use burn::tensor::{DType, TensorData};
use megaburn_mesh::ShardSpec;

use super::HfDir;
use crate::{buffer::filled, error::CheckpointError};

impl HfDir {
    /// A rank's local values of the parameter whose column `columns[i]` is column `i` of the tensor
    /// `name`. The entire tensor is in memory at once.
    pub(super) fn read_permuted(
        &self,
        name: &str,
        columns: &[Range<usize>],
        transposed: bool,
        spec: &ShardSpec,
        dtype: Option<DType>,
    ) -> Result<TensorData, CheckpointError> {
        let all = ShardSpec::whole(&spec.global_shape, spec.axis, 0, 1);
        let stored = self.read_shard(&[name.to_string()], transposed, &all, dtype)?;
        let width = columns.len();
        let mut place = vec![0; width];
        for (at, column) in columns.iter().enumerate() {
            place[column.start] = at;
        }
        let size = stored.dtype().size();
        let bytes = stored.as_bytes();
        filled(spec.local_shape(), stored.dtype(), |local| {
            for piece in &spec.pieces {
                spec.for_each_run(piece, |to, from, len| {
                    for i in 0..len {
                        let [row, column] = [(from + i) / width, (from + i) % width];
                        let from = (row * width + place[column]) * size;
                        let to = (to + i) * size;
                        local[to..to + size].copy_from_slice(&bytes[from..from + size]);
                    }
                });
            }
            Ok(())
        })
    }
}
