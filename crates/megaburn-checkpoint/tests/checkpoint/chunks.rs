//! Changes the chunks of checkpoints, so that small tensors have many, or none as in older versions.

use std::{fs, path::Path};

use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

/// Divides the pieces of a checkpoint into chunks of `chunk` bytes. Each file is in one of `folders`
/// or more.
pub(crate) fn set_chunk_bytes(folders: &[impl AsRef<Path>], chunk: usize) {
    change(folders, |manifest| {
        manifest["chunk_bytes"] = chunk.into();
        for file in manifest["files"].as_array_mut().unwrap() {
            let name = file["name"].as_str().unwrap();
            let mut paths = folders.iter().map(|folder| folder.as_ref().join(name));
            let bytes = fs::read(paths.find(|path| path.exists()).unwrap()).unwrap();
            let (header, data) =
                bytes[8..].split_at(u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize);
            let header: Value = serde_json::from_slice(header).unwrap();
            for piece in file["pieces"].as_array_mut().unwrap() {
                let offsets = &header[piece["key"].as_str().unwrap()]["data_offsets"];
                let [start, end] = [0, 1].map(|i| offsets[i].as_u64().unwrap() as usize);
                let hash = |chunk: &[u8]| format!("{:016x}", xxh3_64(chunk)).into();
                let hashes: Vec<Value> = data[start..end].chunks(chunk).map(hash).collect();
                piece["chunks"] = hashes.into();
            }
        }
    });
}

/// Removes all hashes of chunks.
pub(crate) fn remove_chunks(folders: &[impl AsRef<Path>]) {
    change(folders, |manifest| {
        let fields = manifest.as_object_mut().unwrap();
        fields.remove("chunk_bytes").unwrap();
        for file in manifest["files"].as_array_mut().unwrap() {
            for piece in file["pieces"].as_array_mut().unwrap() {
                piece.as_object_mut().unwrap().remove("chunks").unwrap();
            }
        }
    });
}

/// Changes the manifest of a checkpoint, of which each folder has a copy.
fn change(folders: &[impl AsRef<Path>], change: impl FnOnce(&mut Value)) {
    let path = folders[0].as_ref().join("manifest.json");
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut manifest);
    let text = serde_json::to_vec_pretty(&manifest).unwrap();
    for folder in folders {
        let folder = folder.as_ref();
        fs::write(folder.join("manifest.json"), &text).unwrap();
        let hash = format!("{:016x}", xxh3_64(&text));
        fs::write(folder.join("manifest.xxh3"), hash).unwrap();
    }
}
