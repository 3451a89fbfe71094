//! Which files of a folder hold the weights of a published model.

use std::{collections::BTreeMap, ffi::OsStr, fs, path::Path};

use serde::Deserialize;

use super::{
    INDEX, SINGLE, TORCH_INDEX, TORCH_SINGLE, json::read_json, quantized::FoundTensors,
    safetensors, torch, warn_once::warn_once,
};
use crate::{
    error::{CheckpointError, IoContext},
    source::nearest,
};

/// Files of a training program that are no weights, although their names end like those.
const NO_WEIGHTS: [&str; 5] = [
    "optimizer",
    "scheduler",
    "scaler",
    "rng_state",
    "training_args",
];

/// Opens one file.
type Open = fn(&Path) -> Result<FoundTensors, CheckpointError>;

/// Opens the weights in a folder: safetensors files if there are any, else PyTorch's. A single file
/// comes before an index, as in `transformers`.
///
/// # Errors
/// There are no weights, or several `.pt` files; the index or a file is damaged.
pub(super) fn open(folder: &Path) -> Result<FoundTensors, CheckpointError> {
    let has = |name: &str| folder.join(name).exists();
    let is_safe = has(SINGLE) || has(INDEX);
    if is_safe {
        tell_of_others(folder);
    }
    if has(SINGLE) {
        safetensors::open(&folder.join(SINGLE))
    } else if has(INDEX) {
        open_indexed(folder, INDEX, safetensors::open)
    } else if has(TORCH_SINGLE) {
        torch::open(&folder.join(TORCH_SINGLE))
    } else if has(TORCH_INDEX) {
        open_indexed(folder, TORCH_INDEX, torch::open)
    } else {
        let path = folder.to_path_buf();
        match other_files(folder)?.as_slice() {
            [] => Err(CheckpointError::NoWeights { path }),
            [file] => torch::open(&folder.join(file)),
            files => Err(CheckpointError::SeveralWeights {
                path,
                files: files.join(", "),
            }),
        }
    }
}

/// The files in a folder that end in `.pt` or `.pth` and may hold weights, in order.
fn other_files(folder: &Path) -> Result<Vec<String>, CheckpointError> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).during("read the folder", folder)? {
        let entry = entry.during("read the folder", folder)?;
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        let is_torch = [".pt", ".pth"].iter().any(|end| name.ends_with(end));
        if is_torch && !NO_WEIGHTS.iter().any(|start| name.starts_with(start)) {
            found.push(name);
        }
    }
    found.sort();
    Ok(found)
}

/// Says, once for each folder, that files of PyTorch are not read because there are safetensors.
fn tell_of_others(folder: &Path) {
    let named = [TORCH_SINGLE, TORCH_INDEX].map(String::from);
    let mut others: Vec<String> = named
        .into_iter()
        .filter(|name| folder.join(name).exists())
        .collect();
    // A folder that cannot be listed has the files that are used all the same.
    others.extend(other_files(folder).unwrap_or_default());
    if others.is_empty() {
        return;
    }
    warn_once(format!(
        "{}: {} {} not read, because the folder has safetensors files",
        folder.display(),
        others.join(", "),
        if others.len() == 1 { "is" } else { "are" }
    ));
}

/// The contents of `model.safetensors.index.json` or `pytorch_model.bin.index.json`.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Opens the files that an index names.
fn open_indexed(folder: &Path, index: &str, open: Open) -> Result<FoundTensors, CheckpointError> {
    let path = folder.join(index);
    let Index { weight_map } = read_json(&path)?;
    let mut files: BTreeMap<String, FoundTensors> = BTreeMap::new();
    let mut tensors = FoundTensors::new();
    for (tensor, name) in weight_map {
        if !files.contains_key(&name) {
            let refuse = |why| Err(CheckpointError::damaged(&path, why));
            if Path::new(&name).file_name() != Some(OsStr::new(&name)) {
                return refuse(format!(
                    "it maps tensor `{tensor}` to `{name}`, which is not a file name"
                ));
            }
            if !folder.join(&name).exists() {
                let why = format!("it maps tensor `{tensor}` to `{name}`, which is missing");
                return refuse(why);
            }
            files.insert(name.clone(), open(&folder.join(&name))?);
        }
        let file = &files[&name];
        let Some(found) = file.get(&tensor) else {
            let near = nearest(&tensor, file.keys());
            let why = format!(
                "it maps tensor `{tensor}` to `{name}`, which does not contain it; the nearest \
                name there is `{near}`"
            );
            return Err(CheckpointError::damaged(&path, why));
        };
        tensors.insert(tensor, found.clone());
    }
    Ok(tensors)
}
