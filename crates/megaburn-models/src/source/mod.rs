//! Reads the weights of a model from a Hugging Face folder, a checkpoint of torchtitan, a
//! checkpoint, or a run.

mod assets;
mod check;
mod choice;
mod mtp;
mod names;
mod open;
mod torchtitan;
mod view;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use burn::tensor::{DType, TensorData};
use megaburn_checkpoint::{Checkpoint, hf::HfDir, retried};
use megaburn_collective::Progress;
use megaburn_mesh::{ShardPlan, ShardSpec};
use megaburn_parallel::load_params;

pub use open::open_tensors;

use crate::{
    decoder::{Decoder, DecoderConfig},
    error::ModelError,
    hf::{HfParam, HfPart},
};

/// An opened model: its configuration and its weights. Each rank reads only the weights that it
/// holds.
#[derive(Debug)]
pub struct ModelSource {
    path: PathBuf,
    config: DecoderConfig,
    /// The parameters by path.
    params: BTreeMap<String, HfParam>,
    has_bare_names: bool,
    weights: Weights,
}

#[derive(Debug)]
enum Weights {
    Hf(HfDir),
    Checkpoint(Box<Checkpoint>),
}

/// The prefix of the model's parameters in a checkpoint.
pub(crate) const PREFIX: &str = "model.";

impl ModelSource {
    fn new(
        path: &Path,
        config: DecoderConfig,
        params: Vec<HfParam>,
        has_bare_names: bool,
        weights: Weights,
    ) -> Self {
        let params = params
            .into_iter()
            .map(|param| (param.path.clone(), param))
            .collect();
        Self {
            path: path.to_path_buf(),
            config,
            params,
            has_bare_names,
            weights,
        }
    }

    /// Whether the names on Hugging Face lack the family's prefix, as in models that were saved
    /// without a head.
    pub(crate) fn has_bare_names(&self) -> bool {
        self.has_bare_names
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The configuration of the model.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// All parameters, sorted by path.
    pub fn params(&self) -> impl Iterator<Item = &HfParam> {
        self.params.values()
    }

    /// Number of elements of all parameters; a tied matrix counts once.
    pub fn num_params(&self) -> usize {
        self.params()
            .map(|param| param.shape.iter().product::<usize>())
            .sum()
    }

    /// The Hugging Face folder, if the source is one. A checkpoint of torchtitan is seen as one.
    pub fn hf_dir(&self) -> Option<&HfDir> {
        match &self.weights {
            Weights::Hf(dir) => Some(dir),
            Weights::Checkpoint(_) => None,
        }
    }

    /// The checkpoint, if the source is a checkpoint or a run.
    pub fn checkpoint(&self) -> Option<&Checkpoint> {
        match &self.weights {
            Weights::Hf(_) => None,
            Weights::Checkpoint(checkpoint) => Some(checkpoint),
        }
    }

    /// Verifies the hashes of a checkpoint's files; folders of other systems have none.
    ///
    /// # Errors
    /// The content of a file differs from what was written.
    pub fn verify(&self) -> Result<(), ModelError> {
        self.verify_with(&Progress::none())
    }

    /// Like [`verify`](Self::verify), but reports the bytes read to `progress`, for a rank on which
    /// others wait.
    ///
    /// # Errors
    /// As [`verify`](Self::verify).
    pub fn verify_with(&self, progress: &Progress) -> Result<(), ModelError> {
        let verify = |checkpoint: &Checkpoint| retried(|| checkpoint.verify_with(progress));
        Ok(self.checkpoint().map_or(Ok(()), verify)?)
    }

    /// The stored element type of the parameter at `path`.
    ///
    /// # Errors
    /// The model has no such parameter, or its tensors have different types.
    pub fn dtype(&self, path: &str) -> Result<DType, ModelError> {
        let param = self.param(path)?;
        let dir = match &self.weights {
            Weights::Checkpoint(checkpoint) => {
                return Ok(checkpoint.dtype(&format!("{PREFIX}{path}"))?);
            }
            Weights::Hf(dir) => dir,
        };
        let dtype = |name: &str| dir.header(name).map(|header| header.dtype);
        let found = param.parts.iter().filter_map(|part| dtype(&part.name));
        let found: Vec<DType> = found.collect();
        if found.iter().all(|dtype| *dtype == found[0]) {
            return Ok(found[0]);
        }
        Err(ModelError::Tensor {
            path: self.path.clone(),
            name: param.names().join(" | "),
            why: format!(
                "are {found:?}, but form one parameter: choose one element type \
                         (--dtype)"
            ),
        })
    }

    /// Whether the model has a parameter at `path`.
    pub(crate) fn has_param(&self, path: &str) -> bool {
        self.params.contains_key(path)
    }

    /// Whether the parameter at `path` has no gradient.
    pub fn is_buffer(&self, path: &str) -> bool {
        self.params.get(path).is_some_and(|param| param.is_buffer)
    }

    /// A rank's shard of the parameter at `path`, converted to `dtype`, or in its stored type if
    /// `dtype` is `None`.
    ///
    /// # Shapes
    /// `shard.local_shape()`, padding zero.
    /// # Errors
    /// The model has no such parameter, it has another shape, or a file is damaged.
    pub fn shard(
        &self,
        path: &str,
        shard: &ShardSpec,
        dtype: Option<DType>,
    ) -> Result<TensorData, ModelError> {
        let param = self.param(path)?;
        Ok(match &self.weights {
            Weights::Hf(dir) => match param.parts.as_slice() {
                [HfPart { name, columns }] if columns.len() > 1 => {
                    dir.read_shard_in_order(name, columns, param.transposed, shard, dtype)?
                }
                _ => dir.read_shard(&param.names(), param.transposed, shard, dtype)?,
            },
            Weights::Checkpoint(checkpoint) => {
                let name = format!("{PREFIX}{path}");
                let dtype = dtype.map_or_else(|| checkpoint.dtype(&name), Ok)?;
                checkpoint.read(&name, shard, dtype)?
            }
        })
    }

    /// Loads this rank's shard of every parameter into `model`, in f32.
    ///
    /// # Errors
    /// See [`shard`](Self::shard).
    pub fn load(&self, model: Decoder, plan: &ShardPlan) -> Result<Decoder, ModelError> {
        load_params(model, |path, _| self.local(path, plan))
    }

    /// This rank's shard of the parameter at `path`, in f32.
    ///
    /// # Errors
    /// See [`shard`](Self::shard).
    ///
    /// # Panics
    /// If the plan is that of another model.
    pub fn local(&self, path: &str, plan: &ShardPlan) -> Result<TensorData, ModelError> {
        let shard = &plan.get(path).expect("the plan was validated").shard;
        self.shard(path, shard, Some(DType::F32))
    }

    fn param(&self, path: &str) -> Result<&HfParam, ModelError> {
        self.params.get(path).ok_or_else(|| ModelError::Tensor {
            path: self.path.clone(),
            name: path.to_string(),
            why: format!("is not a parameter of this {} model", self.config.family),
        })
    }
}
