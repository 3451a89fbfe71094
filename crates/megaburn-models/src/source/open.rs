//! Opens the model at a path, and checks that it is complete.

use std::{fs, path::Path};

use megaburn_checkpoint::{
    Checkpoint, CheckpointError, Latest, hf::HfDir, may_pass, newest, retried,
};

use super::{
    ModelSource, PREFIX, Weights,
    check::{check_tensors, has_binary_head, has_own_head},
    choice::chosen,
    mtp::{check_copies, copies, predicts},
    names::{name_of_today, named_params},
    torchtitan,
};
use crate::{assets::Assets, decoder::DecoderConfig, error::ModelError, hf::HfParam};

/// The kind of file at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SourceKind {
    File,
    Folder,
    Nothing,
}

/// Looks up the kind of file at a path.
///
/// # Errors
/// The system cannot answer; this does not mean that the path does not exist.
fn kind(path: &Path) -> Result<SourceKind, CheckpointError> {
    let look = || match fs::metadata(path) {
        Ok(found) if found.is_dir() => Ok(SourceKind::Folder),
        Ok(_) => Ok(SourceKind::File),
        Err(source) if may_pass(&source) => Err(CheckpointError::Io {
            action: "access",
            path: path.to_path_buf(),
            source,
        }),
        Err(_) => Ok(SourceKind::Nothing),
    };
    retried(look)
}

/// Opens the tensors of a folder that another system wrote: a published model of any architecture,
/// or a checkpoint of torchtitan, whose tensors get the names on Hugging Face. `None` if the folder
/// is neither.
///
/// # Errors
/// A file cannot be read or is damaged, or a checkpoint of torchtitan lacks what a model needs.
pub fn open_tensors(path: &Path) -> Result<Option<HfDir>, ModelError> {
    let has = |name: &str| Ok::<_, ModelError>(kind(&path.join(name))? == SourceKind::File);
    // torchtitan can also save the weights as a published model, which is complete.
    let is_safe = has("model.safetensors")? || has("model.safetensors.index.json")?;
    if has(torchtitan::METADATA)? && !is_safe {
        return torchtitan::open(path).map(Some);
    }
    if has("config.json")? {
        return Ok(Some(retried(|| HfDir::open(path))?));
    }
    Ok(None)
}

impl ModelSource {
    /// Opens a Hugging Face folder (which has `config.json`), a checkpoint of torchtitan
    /// (`.metadata`), a checkpoint (`manifest.json`) or a run (`checkpoints/`, where the newest
    /// checkpoint is taken whose files have their full length).
    ///
    /// Names, shapes and element types of all tensors are checked. No weights are read, except for
    /// matrices that must be copies of each other. [`agreed`](Self::agreed) verifies the weights of
    /// a run's checkpoint.
    ///
    /// # Errors
    /// - The path is none of the four.
    /// - A file cannot be read or is damaged.
    /// - A run has no complete checkpoint.
    /// - The architecture is not supported.
    /// - A tensor is missing, has another shape, is not of floats, or is unknown.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        Self::open_by(path, newest)
    }

    pub(super) fn open_by(
        path: &Path,
        choose: impl Fn(&Path) -> Result<Latest, CheckpointError>,
    ) -> Result<Self, ModelError> {
        if let Some(dir) = open_tensors(path)? {
            return Self::open_hf(path, dir);
        }
        let checkpoints = path.join("checkpoints");
        let weights = if kind(&path.join("manifest.json"))? == SourceKind::File {
            retried(|| Checkpoint::open(path))?
        } else if kind(&checkpoints)? == SourceKind::Folder {
            chosen(choose(&checkpoints)?, &checkpoints)?
        } else {
            let why = if kind(path)? == SourceKind::Folder {
                "contains neither config.json (a Hugging Face model), .metadata (a checkpoint of \
                torchtitan), manifest.json (a checkpoint) nor checkpoints/ (a run)"
            } else {
                "is not a folder; give a Hugging Face model, a checkpoint or a run"
            };
            return Err(ModelError::File {
                path: path.to_path_buf(),
                why: why.into(),
            });
        };
        Self::open_checkpoint(path, weights)
    }

    fn open_hf(path: &Path, dir: HfDir) -> Result<Self, ModelError> {
        let mut config = DecoderConfig::from_hf(dir.config(), &path.join("config.json"))?;
        let dir = if config.bidirectional {
            dir.renamed(name_of_today)
        } else {
            dir
        };
        if !predicts(&dir, &config, config.layers) {
            // Transformers omits these layers from the weights, but keeps their number in
            // `config.json`.
            config.mtp_layers = 0;
        }
        config.binary_head |= has_binary_head(&dir, &config)?;
        let prefix = config.family.definition().optional_prefix();
        let bare = !dir.tensors().any(|tensor| tensor.name.starts_with(prefix));
        let mut params = named_params(&config, bare)?;
        // The head of masked tokens is always tied, as in Transformers.
        if config.tied && !config.masked_head && has_own_head(&dir, &config, &params)? {
            config.tied = false;
            params = named_params(&config, bare)?;
        }
        let copies = copies(&config, bare);
        check_tensors(&dir, &config, &params, &copies)?;
        check_copies(&dir, &params, &copies)?;
        Ok(Self::new(path, config, params, bare, Weights::Hf(dir)))
    }

    pub(super) fn open_checkpoint(path: &Path, checkpoint: Checkpoint) -> Result<Self, ModelError> {
        let fail = |why: String| ModelError::File {
            path: checkpoint.path().to_path_buf(),
            why,
        };
        let config: DecoderConfig =
            serde_json::from_value(checkpoint.model().clone()).map_err(|error| {
                fail(format!(
                    "contains a model that this version does not support: {error}"
                ))
            })?;
        config.validate()?;
        let bare = Assets::has_bare_names(&checkpoint);
        let params = named_params(&config, bare)?;
        for param in &params {
            let found = checkpoint.global_shape(&format!("{PREFIX}{}", param.path))?;
            if found != param.shape {
                let HfParam { path, shape, .. } = param;
                return Err(fail(format!(
                    "`{path}` is {found:?}, but its model has {shape:?}"
                )));
            }
        }
        Ok(Self::new(
            path,
            config,
            params,
            bare,
            Weights::Checkpoint(Box::new(checkpoint)),
        ))
    }
}
