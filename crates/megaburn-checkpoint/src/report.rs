//! What the ranks wrote, and the manifest that it makes.

use std::{collections::BTreeMap, fs::File, io::Write, path::Path};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::{
    chunks::CHUNK,
    error::{CheckpointError, IoContext},
    hex::hex,
    manifest::{FORMAT, FileInfo, MANIFEST, MANIFEST_HASH, Manifest, TensorInfo},
    paths::sync_dir,
    snapshot::Snapshot,
};

/// What a rank wrote.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Report {
    /// All tensors that the rank holds, written by it or not.
    pub(crate) tensors: BTreeMap<String, TensorInfo>,
    /// Its file, if it wrote anything.
    pub(crate) file: Option<FileInfo>,
}

/// The manifest of what all ranks wrote, and its text.
pub(crate) fn merge(
    snapshot: &Snapshot,
    layout: String,
    reports: Vec<Report>,
) -> Result<(Manifest, String), CheckpointError> {
    let mut tensors: BTreeMap<String, TensorInfo> = BTreeMap::new();
    let mut files = Vec::new();
    for report in reports {
        for (name, info) in report.tensors {
            let known = tensors.entry(name.clone()).or_insert_with(|| info.clone());
            if *known != info {
                let why = format!("ranks disagree about it: {known:?} and {info:?}");
                return Err(CheckpointError::Untiled { name, why });
            }
        }
        files.extend(report.file);
    }
    let Snapshot {
        run_id,
        step,
        model,
        trainer,
    } = snapshot.clone();
    let manifest = Manifest {
        format: FORMAT,
        run_id,
        step,
        layout,
        model,
        trainer,
        tensors,
        files,
        chunk_bytes: Some(CHUNK),
    };
    let refuse = |(name, why)| CheckpointError::Untiled { name, why };
    manifest.check().map_err(refuse)?;
    // Without indentation: a checkpoint of a thousand ranks has a million pieces.
    let text = serde_json::to_string(&manifest).expect("a manifest is serializable");
    Ok((manifest, text))
}

/// Writes the text of a manifest, and its hash.
pub(crate) fn write_manifest(folder: &Path, text: &str) -> Result<(), CheckpointError> {
    let hash = hex(xxh3_64(text.as_bytes()));
    for (name, bytes) in [
        (MANIFEST, text.as_bytes()),
        (MANIFEST_HASH, hash.as_bytes()),
    ] {
        let path = folder.join(name);
        let write = || {
            let mut file = File::create(&path)?;
            file.write_all(bytes)?;
            file.sync_all()
        };
        write().during("write", &path)?;
    }
    sync_dir(folder)
}
