use std::{collections::BTreeMap, ops::Range, path::Path};

use burn::tensor::DType;
use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{chunks::is_chunk, dtype, sizes::num_elements};

/// The format version that this version of megaburn writes.
pub(crate) const FORMAT: u64 = 3;
/// The oldest format version that it reads. Format 2 has no ranges of elements.
pub(crate) const OLDEST_FORMAT: u64 = 2;
pub(crate) const MANIFEST: &str = "manifest.json";
pub(crate) const MANIFEST_HASH: &str = "manifest.xxh3";

/// The contents of `manifest.json`, which describes a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of the format.
    pub format: u64,
    /// The run that wrote the checkpoint; absent in checkpoints of older versions and converted
    /// models.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_id: Option<String>,
    /// Updates done.
    pub step: u64,
    /// The layout that wrote the checkpoint; any other can load it.
    pub layout: String,
    /// The model's configuration, as passed by the trainer.
    pub model: Value,
    /// Other state that a trainer resumes from: samples consumed, seed, position in the schedules.
    pub trainer: Value,
    /// Every tensor by name.
    pub tensors: BTreeMap<String, TensorInfo>,
    /// All files except the manifest and its hash.
    pub files: Vec<FileInfo>,
    /// Bytes of a chunk, the part of a piece that has one hash. Checkpoints of older versions have
    /// no chunks, only one hash per file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunk_bytes: Option<u64>,
}

/// An unsharded tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorInfo {
    /// Element type, named as in safetensors.
    pub dtype: Dtype,
    /// Shape of the unsharded tensor, without padding.
    pub global_shape: Vec<usize>,
}

/// A safetensors file of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileInfo {
    /// The file's name in the checkpoint's folder.
    pub name: String,
    /// The file's length in bytes.
    pub bytes: u64,
    /// The file's xxh3 (64 bits), hexadecimal.
    pub xxh3: String,
    /// The pieces of tensors that it holds.
    pub pieces: Vec<PieceInfo>,
}

impl FileInfo {
    /// The rank that wrote the file, if its name says so.
    pub(crate) fn writer(&self) -> Option<usize> {
        rank_of_file(&self.name)
    }
}

/// The rank whose file has this name.
pub(crate) fn rank_of_file(name: &str) -> Option<usize> {
    let digits = name.strip_prefix("rank-")?.strip_suffix(".safetensors")?;
    let rank = digits.parse().ok()?;
    (rank_file(rank) == name).then_some(rank)
}

/// The name of the file of a rank.
pub(crate) fn rank_file(rank: usize) -> String {
    format!("rank-{rank:05}.safetensors")
}

/// A slice of a tensor, or a part of one, stored contiguously.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PieceInfo {
    /// The tensor's name.
    pub tensor: String,
    /// The piece's name in the safetensors file.
    pub key: String,
    /// The dimension that is sliced.
    pub dim: usize,
    /// The range of that dimension in the global tensor.
    pub range: Range<usize>,
    /// The range of the slice's elements in row-major order, which is stored flat; absent if the
    /// full slice is stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub elements: Option<Range<usize>>,
    /// The xxh3 (64 bits, hexadecimal) of each chunk. Every chunk except the last has
    /// [`chunk_bytes`](Manifest::chunk_bytes).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chunks: Vec<String>,
}

/// The shape with at least one dimension, so that a scalar can be sliced too.
pub(crate) fn at_least_1d(shape: &[usize]) -> Vec<usize> {
    if shape.is_empty() {
        vec![1]
    } else {
        shape.to_vec()
    }
}

impl TensorInfo {
    /// Element type.
    pub(crate) fn dtype(&self) -> DType {
        dtype::from_file(self.dtype).expect("the manifest was validated")
    }
}

impl PieceInfo {
    /// The shape of the full slice.
    fn slice_shape(&self, info: &TensorInfo) -> Vec<usize> {
        let mut shape = at_least_1d(&info.global_shape);
        shape[self.dim] = self.range.len();
        shape
    }

    /// The shape in the file.
    pub(crate) fn stored_shape(&self, info: &TensorInfo) -> Vec<usize> {
        match &self.elements {
            Some(elements) => vec![elements.len()],
            None => self.slice_shape(info),
        }
    }

    /// The range of the slice's elements that is stored.
    pub(crate) fn stored_elements(&self, info: &TensorInfo) -> Range<usize> {
        let all = || 0..self.slice_shape(info).iter().product();
        self.elements.clone().unwrap_or_else(all)
    }
}

impl Manifest {
    /// Checks that the pieces tile every tensor exactly once. Returns the name of the first invalid
    /// tensor and the reason.
    pub(crate) fn check(&self) -> Result<(), (String, String)> {
        let mut held: BTreeMap<&str, Vec<&PieceInfo>> = BTreeMap::new();
        for file in &self.files {
            if Path::new(&file.name).file_name() != Some(file.name.as_ref()) {
                return Err((String::new(), format!("`{}` is not a file name", file.name)));
            }
            for piece in &file.pieces {
                held.entry(&piece.tensor).or_default().push(piece);
            }
        }
        if let Some(stray) = held.keys().find(|name| !self.tensors.contains_key(**name)) {
            return Err((stray.to_string(), "it has pieces but no entry".into()));
        }
        for (name, info) in &self.tensors {
            if dtype::from_file(info.dtype).is_none() {
                return Err((
                    name.clone(),
                    format!("checkpoints do not support {}", info.dtype),
                ));
            }
            let mut pieces = held.remove(name.as_str()).unwrap_or_default();
            let first = |piece: &PieceInfo| piece.elements.as_ref().map_or(0, |range| range.start);
            pieces.sort_by_key(|piece| (piece.range.start, piece.range.end, first(piece)));
            if num_elements(&info.global_shape).is_none() {
                let why = format!("its shape {:?} is too large", info.global_shape);
                return Err((name.clone(), why));
            }
            let shape = at_least_1d(&info.global_shape);
            tile(&shape, &pieces).map_err(|why| (name.clone(), why))?;
        }
        self.check_lengths()
    }

    /// Checks that every file is long enough for its pieces, and that each piece has one hash per
    /// chunk. After this, no tensor can claim more bytes than the files have.
    fn check_lengths(&self) -> Result<(), (String, String)> {
        if let Some(bytes) = self.chunk_bytes.filter(|bytes| !is_chunk(*bytes)) {
            return Err((String::new(), format!("chunks cannot have {bytes} bytes")));
        }
        for file in &self.files {
            let mut room = file.bytes;
            for piece in &file.pieces {
                let refuse = |why: String| Err((piece.tensor.clone(), why));
                let info = &self.tensors[&piece.tensor];
                let shape = piece.stored_shape(info);
                let elements = num_elements(&shape).expect("a piece is no larger than its tensor");
                let bytes = (elements * dtype::size(info.dtype)) as u64;
                let Some(rest) = room.checked_sub(bytes) else {
                    let name = &file.name;
                    let has = file.bytes;
                    return refuse(format!(
                        "{name} has {has} bytes, too few for its piece of \
                        shape {shape:?}"
                    ));
                };
                room = rest;
                let chunks = self.chunk_bytes.map_or(0, |chunk| bytes.div_ceil(chunk));
                if piece.chunks.len() as u64 != chunks {
                    let found = piece.chunks.len();
                    return refuse(format!("it has {found} hashes for {chunks} chunks"));
                }
            }
        }
        Ok(())
    }
}

fn tile(shape: &[usize], pieces: &[&PieceInfo]) -> Result<(), String> {
    let Some(first) = pieces.first() else {
        return if shape.contains(&0) {
            Ok(())
        } else {
            Err(format!("no rank owns any part of its shape {shape:?}"))
        };
    };
    let dim = first.dim;
    let size = shape.get(dim).copied();
    let size =
        size.ok_or_else(|| format!("dimension {dim} is out of range for shape {shape:?}"))?;
    let mut end = 0;
    for parts in pieces.chunk_by(|a, b| a.range == b.range) {
        let piece = parts[0];
        let range = &piece.range;
        if piece.dim != dim {
            return Err(format!(
                "it is sharded along both dimension {dim} and dimension {}",
                piece.dim
            ));
        }
        if range.end < range.start {
            return Err(format!(
                "{range:?} is not a range of dimension {dim} of {shape:?}"
            ));
        }
        gap_or_overlap(range, end, "", &format!("dimension {dim} of {shape:?}"))?;
        end = range.end;
        if end <= size {
            tile_slice(shape, parts)?;
        }
    }
    if end == size {
        Ok(())
    } else {
        Err(format!(
            "its pieces end at {end} of {size} along dimension {dim} of {shape:?}"
        ))
    }
}

/// Checks that parts of one slice hold each of its elements once.
fn tile_slice(shape: &[usize], parts: &[&PieceInfo]) -> Result<(), String> {
    let (dim, range) = (parts[0].dim, &parts[0].range);
    if let [piece] = parts
        && piece.elements.is_none()
    {
        return Ok(());
    }
    if parts.iter().any(|part| part.dim != dim) {
        return Err(format!(
            "{range:?} is sharded along more than one dimension of {shape:?}"
        ));
    }
    let mut slice = shape.to_vec();
    slice[dim] = range.len();
    let len: usize = slice.iter().product();
    let of = format!("{range:?} of dimension {dim} of {shape:?}");
    let mut end = 0;
    for part in parts {
        let Some(elements) = &part.elements else {
            return Err(format!("two ranks own {of}"));
        };
        if elements.end < elements.start || elements.end > len {
            return Err(format!("{elements:?} are not elements of {of}"));
        }
        gap_or_overlap(elements, end, "the elements ", &of)?;
        end = elements.end;
    }
    gap_or_overlap(&(len..len), end, "the elements ", &of)
}

/// Refuses a range that does not begin at `end`, where the one before it ends.
fn gap_or_overlap(range: &Range<usize>, end: usize, what: &str, of: &str) -> Result<(), String> {
    if range.start == end {
        return Ok(());
    }
    let owners = if range.start > end {
        "no rank owns"
    } else {
        "two ranks own"
    };
    let (from, to) = (end.min(range.start), end.max(range.start));
    Err(format!("{owners} {what}{from}..{to} of {of}"))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::hex::hex;

    fn manifest(shape: &[usize], pieces: &[(usize, Range<usize>)]) -> Manifest {
        let piece = |(dim, range): &(usize, Range<usize>)| PieceInfo {
            tensor: "w".into(),
            key: format!("w#{}", range.start),
            dim: *dim,
            range: range.clone(),
            elements: None,
            chunks: Vec::new(),
        };
        let info = TensorInfo {
            dtype: Dtype::F32,
            global_shape: shape.to_vec(),
        };
        Manifest {
            format: FORMAT,
            run_id: None,
            step: 1,
            layout: "tp2".into(),
            model: Value::Null,
            trainer: Value::Null,
            tensors: [("w".to_string(), info)].into(),
            files: vec![FileInfo {
                name: "rank-00000.safetensors".into(),
                bytes: 4096,
                xxh3: hex(0),
                pieces: pieces.iter().map(piece).collect(),
            }],
            chunk_bytes: None,
        }
    }

    #[rstest]
    #[case(&[4, 6], &[(1, 3..6), (1, 0..3)], None)]
    #[case(&[], &[(0, 0..1)], None)]
    #[case(&[0, 6], &[], None)]
    #[case(&[4, 6], &[], Some("no rank owns any part of its shape [4, 6]"))]
    #[case(&[4, 6], &[(1, 0..3), (1, 4..6)], Some("no rank owns 3..4 of dimension 1"))]
    #[case(&[4, 6], &[(1, 0..3), (1, 2..6)], Some("two ranks own 2..3 of dimension 1"))]
    #[case(&[4, 6], &[(1, 0..3)], Some("end at 3 of 6"))]
    #[case(&[4, 6], &[(0, 0..4), (1, 0..6)], Some("both dimension 0 and dimension 1"))]
    #[case(&[4, 6], &[(2, 0..4)], Some("dimension 2 is out of range"))]
    fn pieces_must_tile_their_tensor(
        #[case] shape: &[usize],
        #[case] pieces: &[(usize, Range<usize>)],
        #[case] fault: Option<&str>,
    ) {
        match (manifest(shape, pieces).check(), fault) {
            (Ok(()), None) => {}
            (Err((name, why)), Some(fault)) => {
                assert_eq!(name, "w");
                assert!(why.contains(fault), "{why}");
            }
            (result, _) => panic!("{result:?}"),
        }
    }

    #[test]
    fn an_element_type_that_no_checkpoint_holds_is_refused() {
        let mut manifest = manifest(&[2], &[(0, 0..2)]);
        manifest.tensors.get_mut("w").unwrap().dtype = Dtype::F8_E4M3;
        assert!(
            manifest
                .check()
                .unwrap_err()
                .1
                .contains("do not support F8_E4M3")
        );
    }

    #[test]
    fn a_file_outside_the_folder_is_refused() {
        let mut manifest = manifest(&[2], &[(0, 0..2)]);
        manifest.check().unwrap();
        manifest.files[0].name = "../rank-00000.safetensors".into();
        assert!(
            manifest
                .check()
                .unwrap_err()
                .1
                .contains("is not a file name")
        );
    }

    /// Sizes whose product would overflow, or that would make a reader allocate more memory than
    /// the files have.
    #[test]
    fn a_size_beyond_the_files_is_refused() {
        let whole = manifest(&[2, 3], &[(0, 0..2)]);
        whole.check().unwrap();
        for (shape, why) in [
            (
                vec![1 << 20, 1 << 20],
                "too few for its piece of shape [1048576, 1048576]",
            ),
            (vec![1 << 32, 1 << 32], "is too large"),
            (vec![usize::MAX], "is too large"),
            (vec![0, 1 << 40, 1 << 40], "is too large"),
        ] {
            let mut manifest = whole.clone();
            manifest.files[0].pieces[0].range = 0..shape[0];
            manifest.tensors.get_mut("w").unwrap().global_shape = shape;
            let (name, found) = manifest.check().unwrap_err();
            assert!(name == "w" && found.contains(why), "{found}");
        }
        let mut manifest = whole.clone();
        manifest.files[0].bytes = 23;
        assert!(
            manifest
                .check()
                .unwrap_err()
                .1
                .contains("has 23 bytes, too few")
        );
    }

    #[test]
    fn hashes_of_chunks_that_do_not_fit_are_refused() {
        let mut manifest = manifest(&[2, 3], &[(0, 0..2)]);
        for (chunk, hashes, fault) in [
            (Some(16), 2, None),
            (Some(32), 1, None),
            (None, 0, None),
            (Some(16), 1, Some("1 hashes for 2 chunks")),
            (None, 1, Some("1 hashes for 0 chunks")),
            (Some(0), 0, Some("cannot have 0 bytes")),
            (Some(24), 1, Some("cannot have 24 bytes")),
        ] {
            manifest.chunk_bytes = chunk;
            manifest.files[0].pieces[0].chunks = vec![hex(1); hashes];
            match (manifest.check(), fault) {
                (found, None) => found.unwrap(),
                (found, Some(fault)) => assert!(found.unwrap_err().1.contains(fault)),
            }
        }
    }
}
