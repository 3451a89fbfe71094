//! The state of a task's run in a checkpoint, and how a run continues from it.

use std::collections::{BTreeMap, BTreeSet};

use megaburn_checkpoint::Checkpoint;
use megaburn_collective::{Phase, objects};
use megaburn_optim::LossScaler;
use megaburn_report::LossWindow;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{train_task::TrainTask, trainer::ModelTrainer};
use crate::{
    config::{Change, Changes, own_changes},
    error::TrainError,
    resume_error::ResumeError,
    resumed::Resumed,
    start::settle,
    stored_checkpoints::StoredCheckpoints,
    trainer::Conversions,
    trainer_core::{Progress, Record, Rollback, difference},
};

/// The state in addition to the tensors that a run needs to continue as if uninterrupted.
#[derive(Debug, Serialize, Deserialize)]
struct TaskState {
    progress: Progress,
    num_train_samples: u64,
    /// The configuration that the run was trained with, with every key. Only used for comparison.
    config: Value,
    loss_scaler: Option<LossScaler>,
    optimizer: String,
    /// With `train.on_spike`, the losses of the last updates.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    losses: Vec<f64>,
    /// With `train.on_spike = "rollback"`, the rollbacks so far.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    rollbacks: Vec<Rollback>,
    /// The validation losses so far, at each step, for `train.keep_best_checkpoints`.
    eval_losses: BTreeMap<u64, f64>,
}

impl<T: TrainTask> ModelTrainer<T> {
    /// What a checkpoint records in addition to tensors.
    pub(super) fn checkpoint_record(&self) -> Record {
        let core = &self.core;
        let state = TaskState {
            progress: core.progress,
            num_train_samples: self.order.num_samples(),
            config: self.config.record(&core.layout()),
            loss_scaler: core.loss_scaler,
            optimizer: core.optimizer.name().to_string(),
            losses: core.losses.losses().collect(),
            rollbacks: core.rollbacks.clone(),
            eval_losses: core.eval_losses.clone(),
        };
        Record {
            model: self.model_record(),
            trainer: json!(state),
        }
    }

    fn model_record(&self) -> Value {
        json!({"task": self.name})
    }

    /// Resumes from the newest intact checkpoint of the run, if there is one.
    ///
    /// # Errors
    /// The checkpoint is of another task, model, optimizer or data; all are damaged.
    /// # Collective
    /// All ranks.
    pub(super) fn resume_from(
        &mut self,
        stored: &StoredCheckpoints,
    ) -> Result<Option<Resumed>, TrainError> {
        let phase = self.core.groups.world.phase(Phase::Load);
        let Some(mut checkpoint) = self.core.find_checkpoint(stored)? else {
            return Ok(None);
        };
        if let Some(what) = difference(checkpoint.model(), &self.model_record()) {
            return Err(other(&checkpoint, format!("is of another task: {what}")));
        }
        let saved: TaskState = serde_json::from_value(checkpoint.trainer().clone())
            .map_err(|error| other(&checkpoint, format!("has no state of a task: {error}")))?;
        self.check_tensors(&checkpoint)?;
        let optimizer = &saved.optimizer;
        if let Some(what) = self
            .core
            .other_optimizer(&checkpoint, optimizer, saved.progress)
        {
            return Err(other(&checkpoint, what));
        }
        let mine = self.config.record(&self.core.layout());
        let Changes { identity, numeric } = own_changes(&saved.config, &mine);
        if let Some(Change { key, old, new }) = identity.first() {
            let what = format!("is from another run: {key} is {old} there and {new} here");
            return Err(other(&checkpoint, what));
        }
        let (old, new) = (saved.num_train_samples, self.order.num_samples());
        if old != new {
            let what = format!("was trained on {old} samples, but the task has {new} now");
            return Err(other(&checkpoint, what));
        }
        self.core.fetch_chunks(&mut checkpoint)?;
        let TaskState {
            progress,
            loss_scaler,
            eval_losses,
            losses,
            rollbacks,
            ..
        } = saved;
        self.core.losses = LossWindow::of(losses);
        self.core.rollbacks = rollbacks;
        self.core.load(
            &checkpoint,
            progress,
            loss_scaler.as_ref(),
            phase.progress(),
        )?;
        if self.core.groups.is_main() {
            self.core.eval_losses = eval_losses;
        }
        Ok(Some(Resumed {
            progress,
            other_run: self.core.other_run(&checkpoint),
            is_recorded: true,
            has_samples: true,
            changes: numeric,
            conversions: Conversions {
                layout: self.core.other_layout(&checkpoint),
                ..Conversions::default()
            },
        }))
    }

    /// Refuses a checkpoint whose parameters are not those of the model on all ranks together.
    ///
    /// # Collective
    /// All ranks; the names and shapes of all parameters.
    fn check_tensors(&self, checkpoint: &Checkpoint) -> Result<(), TrainError> {
        let world = &self.core.groups.world;
        let own = self.core.plan.iter();
        let own: Vec<(String, Vec<usize>)> = own
            .map(|(path, spec)| (path.to_string(), spec.shard.global_shape.to_vec()))
            .collect();
        let all = objects::gather(world, &own)?;
        let checked = match world.rank() {
            0 => compare(checkpoint, all.into_iter().flatten().collect()),
            _ => Ok(()),
        };
        settle(world, checked)
    }
}

/// Compares the parameters of a model with those in a checkpoint.
fn compare(checkpoint: &Checkpoint, mine: BTreeMap<String, Vec<usize>>) -> Result<(), TrainError> {
    let tensors = checkpoint.manifest().tensors.iter();
    let saved: BTreeMap<&str, &[usize]> = tensors
        .filter_map(|(name, info)| Some((name.strip_prefix("model.")?, &*info.global_shape)))
        .collect();
    let names: BTreeSet<&str> = saved
        .keys()
        .copied()
        .chain(mine.keys().map(String::as_str))
        .collect();
    for name in names {
        let what = match (saved.get(name), mine.get(name)) {
            (Some(saved), Some(mine)) if *saved == mine.as_slice() => continue,
            (Some(saved), Some(mine)) => format!("is {saved:?} there and {mine:?} here"),
            (Some(_), None) => "is not in the model here".to_string(),
            (None, _) => "is not in the checkpoint".to_string(),
        };
        let what = format!("is from another model: `{name}` {what}");
        return Err(other(checkpoint, what));
    }
    Ok(())
}

fn other(checkpoint: &Checkpoint, what: String) -> TrainError {
    let path = checkpoint.path().into();
    ResumeError::OtherTask { path, what }.into()
}
