//! Which chunks of a checkpoint's files a rank reads.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use megaburn_mesh::ShardSpec;
use serde::{Deserialize, Serialize};

use crate::{checkpoint::Checkpoint, chunks::ChunkOfFile, pieces::shared_runs};

/// The chunks of a checkpoint's files that a rank reads. A chunk is a part of a stored piece that
/// has one hash, at most 64 MiB.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NeededChunks {
    /// The chunks of each file, by the file's number.
    pub(crate) of_file: BTreeMap<usize, BTreeSet<ChunkOfFile>>,
}

impl NeededChunks {
    /// Adds all chunks of `other`.
    pub(crate) fn extend(&mut self, other: Self) {
        for (file, chunks) in other.of_file {
            self.of_file.entry(file).or_default().extend(chunks);
        }
    }
}

impl Checkpoint {
    /// Adds the chunks that [`read_range`](Self::read_range) would read to `needed`. A tensor that
    /// the checkpoint does not have, or has with another shape, adds none. A file of an older
    /// version, without hashes of chunks, counts as needed as a whole.
    pub fn add_needed(
        &self,
        needed: &mut NeededChunks,
        name: &str,
        shard: &ShardSpec,
        range: Range<usize>,
    ) {
        let Ok(info) = self.info(name) else { return };
        if info.global_shape != shard.global_shape {
            return;
        }
        let size = info.dtype().size();
        for &(file, number) in self.index.get(name).into_iter().flatten() {
            let piece = &self.manifest.files[file].pieces[number];
            for (from, _, len) in shared_runs(info, piece, shard, &range) {
                let chunk_of = |element: usize| {
                    let byte = (element * size) as u64;
                    self.manifest.chunk_bytes.map_or(0, |chunk| byte / chunk) as usize
                };
                let chunks = chunk_of(from)..=chunk_of(from + len - 1);
                let of_file = needed.of_file.entry(file).or_default();
                of_file.extend(chunks.map(|chunk| (number, chunk)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use safetensors::Dtype;
    use serde_json::Value;

    use super::*;
    use crate::{
        manifest::{FORMAT, FileInfo, Manifest, PieceInfo, TensorInfo},
        source::slice_spec,
    };

    /// A vector of 24 elements of 4 bytes in two files, with chunks of 16 bytes.
    fn checkpoint() -> Checkpoint {
        let file = |range: Range<usize>| FileInfo {
            name: format!("rank-{:05}.safetensors", range.start),
            bytes: 1 << 10,
            xxh3: String::new(),
            pieces: vec![PieceInfo {
                tensor: "w".into(),
                key: "w".into(),
                dim: 0,
                chunks: vec![String::new(); range.len().div_ceil(4)],
                range,
                elements: None,
            }],
        };
        let info = TensorInfo {
            dtype: Dtype::F32,
            global_shape: vec![24],
        };
        let manifest = Manifest {
            format: FORMAT,
            run_id: None,
            step: 1,
            layout: "dp2".into(),
            model: Value::Null,
            trainer: Value::Null,
            tensors: [("w".to_string(), info)].into(),
            files: vec![file(0..10), file(10..24)],
            chunk_bytes: Some(16),
        };
        let text = serde_json::to_string(&manifest).unwrap();
        Checkpoint::of_hosts("step-00000001".as_ref(), text, BTreeMap::new()).unwrap()
    }

    #[test]
    fn exactly_the_chunks_with_elements_of_the_range_are_needed() {
        let checkpoint = checkpoint();
        let shard = slice_spec(&[24], 0, std::iter::once(0..24));
        for (start, end) in [(0, 24), (3, 4), (3, 5), (9, 11), (7, 7), (23, 24), (8, 17)] {
            let mut needed = NeededChunks::default();
            checkpoint.add_needed(&mut needed, "w", &shard, start..end);
            let mut expected = NeededChunks::default();
            for element in start..end {
                let (file, own) = if element < 10 {
                    (0, element)
                } else {
                    (1, element - 10)
                };
                let of_file = expected.of_file.entry(file).or_default();
                of_file.insert((0, own / 4));
            }
            assert_eq!(needed, expected, "{start}..{end}");
        }
        let mut needed = NeededChunks::default();
        checkpoint.add_needed(&mut needed, "v", &shard, 0..24);
        checkpoint.add_needed(
            &mut needed,
            "w",
            &slice_spec(&[25], 0, std::iter::once(0..25)),
            0..25,
        );
        assert_eq!(needed, NeededChunks::default());
    }
}
