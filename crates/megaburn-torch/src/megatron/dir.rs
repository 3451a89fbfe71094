use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::dcp::{DcpDir, DcpTensor};
use crate::error::TorchError;
use crate::megatron::buckets::{self, OptimizerBucket};
use crate::megatron::names::{LATEST, ShardedKey, iteration_folder};
use crate::megatron::optimizer::{self, OptimizerForm, OptimizerTensor};
use crate::pickle::Value;
use crate::pt::PtFile;

/// The file that says in which format the others are.
pub(super) const CONFIG: &str = "metadata.json";

/// The file of what all ranks have in common.
pub(super) const COMMON: &str = "common.pt";

/// The most bytes of the small text files.
const MOST_TEXT_BYTES: u64 = 1 << 16;

/// What `metadata.json` says.
///
/// Source: Megatron-Core, `dist_checkpointing/core.py`.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Config {
    pub(super) sharded_backend: String,
    #[serde(default = "one")]
    pub(super) sharded_backend_version: u32,
    #[serde(default = "torch")]
    pub(super) common_backend: String,
    #[serde(default = "one")]
    pub(super) common_backend_version: u32,
}

fn one() -> u32 {
    1
}

fn torch() -> String {
    "torch".into()
}

impl Config {
    /// The format that Megatron-Core 0.16 writes.
    pub(super) fn torch_dist() -> Self {
        Self {
            sharded_backend: "torch_dist".into(),
            sharded_backend_version: 1,
            common_backend: torch(),
            common_backend_version: 1,
        }
    }
}

/// A checkpoint of Megatron-Core in the format `torch_dist`.
///
/// Tensors are those of all ranks together, under any layout. The layers of a model are stacked:
/// the first dim of `decoder.layers.mlp.linear_fc1.weight` counts the layers of the whole model.
#[derive(Debug)]
pub struct MegatronDir {
    dcp: DcpDir,
    common: PtFile,
}

impl MegatronDir {
    /// Opens the folder of an iteration, or the folder above, whose newest iteration is taken.
    ///
    /// # Errors
    /// There is no checkpoint, it is in another format, is damaged or cannot be read.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, TorchError> {
        let folder = iteration_of(path.as_ref())?;
        let file = folder.join(CONFIG);
        let other = |why: String| TorchError::OtherKind {
            path: file.clone(),
            why,
        };
        let text = text(&file)?.unwrap_or_default();
        let config: Config =
            serde_json::from_str(&text).map_err(|error| other(error.to_string()))?;
        if config != Config::torch_dist() {
            return Err(other(format!(
                "the checkpoint has the format {} {}, {} {}; save it with --ckpt-format torch_dist",
                config.sharded_backend,
                config.sharded_backend_version,
                config.common_backend,
                config.common_backend_version
            )));
        }
        Ok(Self {
            common: PtFile::open(folder.join(COMMON))?,
            dcp: DcpDir::open(folder)?,
        })
    }

    /// All tensors and objects, by the names in the checkpoint.
    pub fn dcp(&self) -> &DcpDir {
        &self.dcp
    }

    /// What all ranks have in common, a dict: `args`, `iteration`, `optimizer`, ...
    pub fn common(&self) -> &PtFile {
        &self.common
    }

    /// The number of steps that were trained.
    pub fn iteration(&self) -> Option<u64> {
        let iteration = self.common.root().get("iteration")?.as_i64()?;
        u64::try_from(iteration).ok()
    }

    /// An argument of the run, such as `hidden_size`; `None` if there is none of this name.
    pub fn arg(&self, name: &str) -> Option<Value<'_>> {
        self.common.root().get("args")?.attribute(name)
    }

    /// The tensors of the model, each with its name.
    pub fn model(&self) -> impl Iterator<Item = (&str, &DcpTensor)> {
        let tensors = self.dcp.tensors();
        tensors.filter(|(name, _)| !optimizer::is_of_optimizer(name))
    }

    /// How the checkpoint has the state of the optimizer.
    pub fn optimizer_form(&self) -> OptimizerForm {
        optimizer::form(&self.dcp)
    }

    /// The tensors of the optimizer's state; none if the checkpoint has no such state.
    ///
    /// # Errors
    /// The state is in a form whose tensors do not belong to one parameter each:
    /// [`OptimizerForm::ByBucket`], or what Megatron-Core before 0.14 wrote.
    pub fn optimizer(&self) -> Result<Vec<OptimizerTensor<'_>>, TorchError> {
        optimizer::tensors(&self.dcp)
    }

    /// The buckets of the optimizer's state, by optimizer, rank, buffer and number; none if the
    /// checkpoint has the state in another form.
    ///
    /// # Errors
    /// A bucket lacks a state, or the states are no floats of one length.
    pub fn buckets(&self) -> Result<Vec<OptimizerBucket>, TorchError> {
        buckets::buckets(&self.dcp)
    }

    /// The objects with the groups of optimizers whose state is in buckets, one for each rank of
    /// model parallelism. Each is a list whose only element has `param_groups`.
    ///
    /// # Errors
    /// An object is damaged or cannot be read.
    pub fn bucket_groups(&self) -> impl Iterator<Item = Result<PtFile, TorchError>> {
        let objects = self.dcp.objects().filter(|name| {
            let inner = optimizer::without_chain(name);
            inner.starts_with("optimizer.distributed.") && inner.ends_with(".optimizer/shard_0_1")
        });
        objects.map(|name| self.dcp.object(name))
    }

    /// The keys of the objects that have a part for each rank or layer.
    pub fn sharded_objects(&self) -> impl Iterator<Item = ShardedKey> {
        self.dcp.objects().filter_map(ShardedKey::parse)
    }

    /// Reads a part of such an object. The root of the file is a list whose only element is the
    /// value.
    ///
    /// # Errors
    /// There is none of this key, or it cannot be read.
    pub fn sharded_object(&self, key: &ShardedKey) -> Result<PtFile, TorchError> {
        self.dcp.object(&key.to_string())
    }
}

/// The folder of an iteration: the given one, or the newest in it.
fn iteration_of(path: &Path) -> Result<PathBuf, TorchError> {
    if path.join(CONFIG).exists() {
        return Ok(path.into());
    }
    let other = |why: String| TorchError::OtherKind {
        path: path.into(),
        why,
    };
    let Some(latest) = text(&path.join(LATEST))? else {
        if path.join("mp_rank_00").exists() || path.join("mp_rank_00_000").exists() {
            return Err(other(
                "it is a checkpoint of Megatron-LM's format `torch`; load it there and save it \
                 with --ckpt-format torch_dist"
                    .into(),
            ));
        }
        return Err(other(format!("it has neither `{CONFIG}` nor `{LATEST}`")));
    };
    let folder = match latest.trim() {
        "release" => "release".into(),
        number => {
            let iteration = number.parse().map(iteration_folder);
            iteration.map_err(|_| other(format!("`{LATEST}` says {number:?}")))?
        }
    };
    let found = path.join(folder);
    if !found.join(CONFIG).exists() {
        return Err(TorchError::OtherKind {
            why: format!("it has no `{CONFIG}`, and `{LATEST}` names it"),
            path: found,
        });
    }
    Ok(found)
}

/// The text of a small file; `None` if there is no such file.
pub(super) fn text(path: &Path) -> Result<Option<String>, TorchError> {
    let read = fs::metadata(path).and_then(|about| match about.len() {
        0..=MOST_TEXT_BYTES => fs::read_to_string(path),
        _ => Err(ErrorKind::FileTooLarge.into()),
    });
    match read {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TorchError::Io {
            action: "read",
            path: path.into(),
            source,
        }),
    }
}
