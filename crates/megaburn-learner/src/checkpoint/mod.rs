//! Checkpoints of model, optimizer and scheduler that any layout with tp and dp resumes from.

mod optimizer;
mod restore;
mod state;

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use burn::module::Module;
use burn_train::{
    checkpoint::{
        CheckpointingAction, CheckpointingStrategy, ComposedCheckpointingStrategy,
        KeepLastNCheckpoints, MetricCheckpointingStrategy,
    },
    metric::{
        LossMetric,
        store::{Aggregate, Direction, EventStoreClient, Split},
    },
};
use megaburn_checkpoint::{
    NamedTensor, Retention, Snapshot, checkpoints_of, list_checkpoints, save,
};
use megaburn_collective::{ProcessGroups, objects};

use crate::{error::LearnerError, parts::Parts, values::map_values};
use optimizer::saved_optimizer;
use state::LearnerState;

/// Burn's default: the last two epochs, and the one with the lowest validation loss.
pub(crate) fn default_strategy() -> Box<dyn CheckpointingStrategy> {
    let best = MetricCheckpointingStrategy::new(
        &LossMetric::new(),
        Aggregate::Mean,
        Direction::Lowest,
        Split::Valid,
    );
    let strategy = ComposedCheckpointingStrategy::builder()
        .add(KeepLastNCheckpoints::new(2))
        .add(best);
    Box::new(strategy.build())
}

/// The beginning of the names of parameters' values in a checkpoint.
const MODEL: &str = "model.";

/// The name of a parameter's values in a checkpoint.
fn model_name(path: &str) -> String {
    format!("{MODEL}{path}")
}

/// The steps of the checkpoints that any run wrote to `folder`.
fn steps(folder: &Path) -> Result<BTreeSet<u64>, LearnerError> {
    let all = list_checkpoints(folder)?.into_iter();
    Ok(all.filter_map(|checkpoint| checkpoint.step).collect())
}

/// The steps of the checkpoints that the run wrote to `folder`.
fn steps_of_run(folder: &Path, run_id: &str) -> Result<BTreeSet<u64>, LearnerError> {
    let all = checkpoints_of(folder, run_id)?.into_iter();
    Ok(all.map(|(step, _)| step).collect())
}

/// The checkpoints of a training.
pub(crate) struct Checkpoints {
    folder: PathBuf,
    strategy: Box<dyn CheckpointingStrategy>,
    /// The id of the run, which is stored in its checkpoints. Others are never deleted.
    run_id: String,
    /// The epochs whose checkpoints stay.
    kept: BTreeSet<u64>,
}

impl Checkpoints {
    pub(crate) fn new(folder: PathBuf, strategy: Box<dyn CheckpointingStrategy>) -> Self {
        Self {
            folder,
            strategy,
            run_id: String::new(),
            kept: BTreeSet::new(),
        }
    }

    /// Loads the checkpoint of `epoch` into `parts`, or begins a run without one.
    ///
    /// # Errors
    /// A new run finds checkpoints in the folder; the checkpoint cannot be read, or is one of another
    /// model.
    /// # Collective
    /// All ranks; a few small values.
    pub(crate) fn opened<M: Module>(
        mut self,
        parts: &mut Parts<M>,
        groups: &ProcessGroups,
        epoch: Option<usize>,
    ) -> Result<Self, LearnerError> {
        let world = &groups.world;
        if let Some(epoch) = epoch {
            self.run_id = restore::restore(&self.folder, epoch as u64, parts)?;
        }
        let mut found = BTreeSet::new();
        if groups.is_main() && self.folder.is_dir() {
            found = match epoch {
                Some(_) => steps_of_run(&self.folder, &self.run_id)?,
                None => steps(&self.folder)?,
            };
        }
        found = objects::broadcast(world, &found)?;
        if epoch.is_none() {
            if let Some(&epoch) = found.last() {
                let folder = self.folder;
                return Err(LearnerError::OtherRun { folder, epoch });
            }
            let since = SystemTime::now().duration_since(UNIX_EPOCH);
            let nanos = since.map_or(0, |time| time.as_nanos());
            self.run_id = objects::broadcast(world, &format!("learner-{nanos:x}"))?;
        }
        self.kept = found;
        Ok(self)
    }

    /// Saves the epoch if rank 0's strategy says so.
    ///
    /// # Collective
    /// All ranks. Rank 0 sends its decision, and then [`save`] sends a few messages.
    pub(crate) fn save<M: Module>(
        &mut self,
        parts: &Parts<M>,
        groups: &ProcessGroups,
        store: &EventStoreClient,
        epoch: usize,
    ) -> Result<(), LearnerError> {
        let actions = if groups.is_main() {
            self.strategy.checkpointing(epoch, store)
        } else {
            Vec::new()
        };
        let is_saved = actions.contains(&CheckpointingAction::Save);
        let deleted = actions.iter().filter_map(|action| match action {
            CheckpointingAction::Delete(epoch) => Some(*epoch as u64),
            CheckpointingAction::Save => None,
        });
        let deleted: Vec<u64> = deleted.collect();
        let (is_saved, deleted) = objects::broadcast(&groups.world, &(is_saved, deleted))?;
        for epoch in deleted {
            self.kept.remove(&epoch);
        }
        if !is_saved {
            return Ok(());
        }
        self.kept.insert(epoch as u64);
        self.write(parts, groups, epoch as u64)
    }

    fn write<M: Module>(
        &self,
        parts: &Parts<M>,
        groups: &ProcessGroups,
        epoch: u64,
    ) -> Result<(), LearnerError> {
        let mut ids = Vec::new();
        let mut values = Vec::new();
        map_values(parts.model().clone(), |value| {
            ids.push((value.id, value.path.to_owned()));
            values.push((
                model_name(value.path),
                value.path.to_owned(),
                (value.read)(),
            ));
            Ok(None)
        })?;
        let optimizer = saved_optimizer(parts, &ids, groups)?;
        let of_model = values.into_iter().map(|(name, path, data)| {
            let spec = parts.plan.get(&path).expect("the plan has all parameters");
            NamedTensor::new(name, &spec.shard, data)
        });
        let of_optimizer = optimizer.tensors.iter();
        let of_optimizer = of_optimizer
            .map(|state| NamedTensor::new(state.name(), &state.spec, state.data.clone()));
        let tensors: Vec<_> = of_model.chain(of_optimizer).collect();
        let state = LearnerState {
            scheduler: state::scheduler_scalars(&parts.scheduler)?,
            optimizer: optimizer.state(),
        };
        let snapshot = Snapshot {
            run_id: Some(self.run_id.clone()),
            step: epoch,
            model: serde_json::Value::Null,
            trainer: state.into_json(),
        };
        let retention = Retention {
            newest: 1,
            in_use: self.kept.clone(),
            ..Retention::default()
        };
        save(
            self.folder.as_path(),
            &retention,
            None,
            groups,
            &snapshot,
            tensors,
        )?;
        Ok(())
    }
}
