use burn::tensor::{DType, Tensor, TensorData};
use megaburn_checkpoint::{CheckpointError, Guard, NamedTensor, Snapshot, is_written_by, save};
use megaburn_collective::Phase;
use megaburn_mesh::ShardSpec;
use megaburn_optim::{FullState, LossScaler, StateTensor};
use megaburn_parallel::lazy_params;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{
    config::DataOrder,
    data::BlendRecord,
    error::TrainError,
    run_folder::RunShare,
    trainer::{Progress, Trainer},
};

/// The state in addition to the tensors that a run needs to continue as if uninterrupted. Learning
/// rates, batches and data are functions of these numbers.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct TrainerState {
    pub(super) progress: Progress,
    pub(super) seed: u64,
    pub(super) seq_len: usize,
    pub(super) data_hash: u64,
    /// [`megaburn_data::Samples::order_hash`].
    #[serde(default)]
    pub(super) order_hash: u64,
    pub(super) num_train_samples: u64,
    /// How the training data sets are mixed.
    #[serde(default)]
    pub(super) blend: Option<BlendRecord>,
    /// The multiple that documents are padded to, if samples are split into documents.
    #[serde(default)]
    pub(super) document_multiple: Option<usize>,
    /// The configuration that the run was trained with, with every key. Only used for comparison.
    #[serde(default)]
    pub(super) config: Value,
    #[serde(default)]
    pub(super) loss_scaler: Option<LossScaler>,
    #[serde(default = "adamw")]
    pub(super) optimizer: String,
    /// For each layer, the fraction of the last step's tokens that each expert got.
    #[serde(default)]
    pub(super) last_load: Vec<Option<Vec<f64>>>,
}

/// The optimizer of checkpoints from before there was a choice.
fn adamw() -> String {
    "adamw".to_string()
}

impl Trainer {
    /// Writes a checkpoint of the current state into `run.dir`.
    ///
    /// The values that the optimizer updates are written: for bf16 and f16 parameters their f32
    /// masters, if they have any, and the optimizer state in its own types. Reading converts to
    /// wider types. So a run can continue from a checkpoint of other types; one that keeps fewer
    /// bits rounds what it reads.
    ///
    /// # Errors
    /// Weights are not finite; any rank fails (the error is on every rank); another run has taken
    /// the folder. Older checkpoints are untouched.
    /// # Collective
    /// All ranks.
    pub fn save(&self) -> Result<(), TrainError> {
        self.check_finite()?;
        let _phase = self.groups.world.phase(Phase::Save);
        let snapshot = Snapshot {
            run_id: self.run.as_ref().map(|run| run.id.clone()),
            step: self.progress.step,
            model: json!(self.model_config),
            trainer: serde_json::to_value(self.state()).expect("numbers are always serializable"),
        };
        let shard = |path: &str| &self.plan.get(path).expect("the plan was validated").shard;
        self.sharding.settle();
        self.sharding.release();
        let FullState {
            mut masters,
            moments,
        } = self
            .optimizer
            .full_state(|path| is_written_by(&self.groups, shard(path)))?;
        let read = |state: StateTensor| state.read().map_err(|error| error.to_string());
        // Tensors are copied to the host when they are written. Tensors that ZeRO shards are there
        // already: `full_state` has gathered them into the host memory of the ranks that write.
        let params = lazy_params(self.model()).into_iter().map(|param| {
            let name = format!("model.{}", param.path);
            let shard = shard(&param.path);
            match masters.remove(&param.path) {
                Some(master) => lazy(name, shard, master.dtype(), move || read(master)),
                None => lazy(name, shard, param.dtype, move || param.read()),
            }
        });
        let params: Vec<_> = params.collect();
        let moments = moments.into_iter().map(|((moment, path), state)| {
            let name = format!("{}.{path}", moment.name());
            lazy(name, shard(&path), state.dtype(), move || read(state))
        });
        let tensors = params.into_iter().chain(moments);
        let keep = self.config.train.keep_checkpoints;
        let still_ours = || self.run.as_ref().map_or(Ok(()), RunShare::check);
        let guard: Option<Guard<'_>> = self.run.is_some().then_some(&still_ours as Guard<'_>);
        let saved = save(
            &self.checkpoints(),
            keep,
            guard,
            &self.groups,
            &snapshot,
            tensors,
        );
        saved.map_err(|error| TrainError::Save {
            step: snapshot.step,
            source: Box::new(error),
        })?;
        if let Some(folder) = self.run.as_ref().and_then(|run| run.folder.as_ref()) {
            folder.discard_set_aside();
        }
        Ok(())
    }

    pub(super) fn state(&self) -> TrainerState {
        TrainerState {
            progress: self.progress,
            seed: self.config.run.seed,
            seq_len: self.config.data.seq_len,
            data_hash: self.data.hash,
            order_hash: self.samples.train.order_hash(),
            num_train_samples: match self.config.data.order {
                DataOrder::Megaburn => self.samples.train.num_samples(),
                // A longer run of as many epochs has the same order.
                DataOrder::Megatron => 0,
            },
            blend: self.samples.blend.clone(),
            document_multiple: self.config.data.split_into(),
            config: self
                .config
                .record(&self.groups.layout(), &self.model_config),
            loss_scaler: self.loss_scaler,
            optimizer: self.optimizer.name().to_string(),
            last_load: self.last_load.clone(),
        }
    }
}

/// A tensor that is read from its device when it is written.
fn lazy<'a>(
    name: String,
    shard: &'a ShardSpec,
    dtype: DType,
    read: impl FnOnce() -> Result<TensorData, String> + 'a,
) -> NamedTensor<'a> {
    let own = name.clone();
    NamedTensor::lazy(name, shard, dtype, move || {
        read().map_err(|why| CheckpointError::Source { name: own, why })
    })
}

pub(super) fn to_host(tensor: Tensor<1>) -> Result<TensorData, String> {
    tensor.try_into_data().map_err(|error| error.to_string())
}
