use std::{collections::BTreeMap, ops::Range, path::Path};

use burn::tensor::DType;
use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::dtype;

/// The format that this version writes and reads.
pub(crate) const FORMAT: u64 = 2;
pub(crate) const MANIFEST: &str = "manifest.json";
pub(crate) const MANIFEST_HASH: &str = "manifest.xxh3";

/// What a checkpoint says of itself: `manifest.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of the format.
    pub format: u64,
    /// The run that wrote it; checkpoints of older versions and converted models have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_id: Option<String>,
    /// Updates done.
    pub step: u64,
    /// The layout that wrote it; any other can load it.
    pub layout: String,
    /// The model's configuration, as the trainer gave it.
    pub model: Value,
    /// What else a trainer resumes from: samples consumed, seed, position in the schedules.
    pub trainer: Value,
    /// Every tensor by name.
    pub tensors: BTreeMap<String, TensorInfo>,
    /// Every file beside the manifest.
    pub files: Vec<FileInfo>,
}

/// A tensor as the model knows it, whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorInfo {
    /// Element type, named as in safetensors.
    pub dtype: Dtype,
    /// Shape of the whole tensor, without padding.
    pub global_shape: Vec<usize>,
}

/// A safetensors file of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileInfo {
    /// Its name in the checkpoint's folder.
    pub name: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// Its xxh3 (64 bits), hexadecimal.
    pub xxh3: String,
    /// What it holds.
    pub pieces: Vec<PieceInfo>,
}

/// A stretch of a tensor, stored contiguously.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PieceInfo {
    /// The tensor's name.
    pub tensor: String,
    /// Its name in the safetensors file.
    pub key: String,
    /// The dimension that is cut.
    pub dim: usize,
    /// Where the piece stands along it in the whole tensor.
    pub range: Range<usize>,
}

/// The hash of a file's bytes as the manifest writes it.
pub(crate) fn hex(hash: u64) -> String {
    format!("{hash:016x}")
}

/// The shape with at least one dimension, so that a scalar can be cut too.
pub(crate) fn at_least_1d(shape: &[usize]) -> Vec<usize> {
    if shape.is_empty() { vec![1] } else { shape.to_vec() }
}

impl TensorInfo {
    /// Element type.
    pub(crate) fn dtype(&self) -> DType {
        dtype::from_file(self.dtype).expect("the manifest was checked")
    }
}

impl Manifest {
    /// Checks that the pieces tile every tensor exactly once. Returns the tensor at fault and why.
    pub(crate) fn check(&self) -> Result<(), (String, String)> {
        let mut held: BTreeMap<&str, Vec<&PieceInfo>> = BTreeMap::new();
        for file in &self.files {
            if Path::new(&file.name).file_name() != Some(file.name.as_ref()) {
                return Err((String::new(), format!("`{}` is no file name", file.name)));
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
                return Err((name.clone(), format!("checkpoints hold no {}", info.dtype)));
            }
            let mut pieces = held.remove(name.as_str()).unwrap_or_default();
            pieces.sort_by_key(|piece| piece.range.start);
            let shape = at_least_1d(&info.global_shape);
            tile(&shape, &pieces).map_err(|why| (name.clone(), why))?;
        }
        Ok(())
    }
}

fn tile(shape: &[usize], pieces: &[&PieceInfo]) -> Result<(), String> {
    let Some(first) = pieces.first() else {
        return match shape.contains(&0) {
            true => Ok(()),
            false => Err(format!("no rank owns any of its {shape:?}")),
        };
    };
    let dim = first.dim;
    let size = shape.get(dim).copied();
    let size = size.ok_or_else(|| format!("it has no dim {dim} among {shape:?}"))?;
    let mut end = 0;
    for piece in pieces {
        let range = &piece.range;
        if piece.dim != dim {
            return Err(format!("it is cut along dim {dim} and along dim {}", piece.dim));
        }
        if range.start != end || range.end < range.start {
            let what = if range.start > end { "no rank owns" } else { "two ranks own" };
            let (from, to) = (end.min(range.start), end.max(range.start));
            return Err(format!("{what} {from}..{to} of dim {dim} of {shape:?}"));
        }
        end = range.end;
    }
    match end == size {
        true => Ok(()),
        false => Err(format!("its pieces end at {end} of {size} along dim {dim} of {shape:?}")),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn manifest(shape: &[usize], pieces: &[(usize, Range<usize>)]) -> Manifest {
        let piece = |(dim, range): &(usize, Range<usize>)| PieceInfo {
            tensor: "w".into(),
            key: format!("w#{}", range.start),
            dim: *dim,
            range: range.clone(),
        };
        let info = TensorInfo { dtype: Dtype::F32, global_shape: shape.to_vec() };
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
                bytes: 0,
                xxh3: hex(0),
                pieces: pieces.iter().map(piece).collect(),
            }],
        }
    }

    #[rstest]
    #[case(&[4, 6], &[(1, 3..6), (1, 0..3)], None)]
    #[case(&[], &[(0, 0..1)], None)]
    #[case(&[0, 6], &[], None)]
    #[case(&[4, 6], &[], Some("no rank owns any of its [4, 6]"))]
    #[case(&[4, 6], &[(1, 0..3), (1, 4..6)], Some("no rank owns 3..4 of dim 1"))]
    #[case(&[4, 6], &[(1, 0..3), (1, 2..6)], Some("two ranks own 2..3 of dim 1"))]
    #[case(&[4, 6], &[(1, 0..3)], Some("end at 3 of 6"))]
    #[case(&[4, 6], &[(0, 0..4), (1, 0..6)], Some("dim 0 and along dim 1"))]
    #[case(&[4, 6], &[(2, 0..4)], Some("no dim 2"))]
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
        assert!(manifest.check().unwrap_err().1.contains("hold no F8_E4M3"));
    }

    #[test]
    fn a_file_outside_the_folder_is_refused() {
        let mut manifest = manifest(&[2], &[(0, 0..2)]);
        manifest.check().unwrap();
        manifest.files[0].name = "../rank-00000.safetensors".into();
        assert!(manifest.check().unwrap_err().1.contains("is no file name"));
    }
}
