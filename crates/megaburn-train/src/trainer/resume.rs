use std::{fs, path::Path};

use megaburn_checkpoint::Checkpoint;
use megaburn_collective::{Phase, Progress as PhaseProgress};
use megaburn_mesh::Layout;
use megaburn_models::{DecoderConfig, ModelError, source::ModelSource};
use megaburn_report::LossWindow;
use serde::de::Error as _;
use serde_json::{Value, json};

use super::{delayed_scales::ResumedAmaxes, save::TrainerState};
use crate::{
    config::{Change, Changes, TrainConfig, changes, record_of_file},
    error::TrainError,
    resume_error::ResumeError,
    resumed::Resumed,
    run_folder::config_of,
    stored_checkpoints::StoredCheckpoints,
    trainer::Trainer,
    trainer_core::difference,
};

impl Trainer {
    /// Resumes from the newest intact checkpoint of the run, if there is one.
    ///
    /// # Errors
    /// All checkpoints are damaged; or the newest intact one is of another model or another order
    /// of samples, or was written by another run while this run has older ones of its own. If reading
    /// its tensors fails, the trainer cannot be used any more.
    /// # Collective
    /// All ranks.
    pub fn resume(&mut self) -> Result<Option<Resumed>, TrainError> {
        self.resume_from(&StoredCheckpoints::none())
    }

    /// As [`resume`](Self::resume), from a checkpoint in the store if that is newer.
    ///
    /// # Errors
    /// As [`resume`](Self::resume); also the checkpoint in the store cannot be copied.
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
        if checkpoint.trainer().is_null() {
            // An imported model that was put there: it has weights only.
            self.check_model(&checkpoint)?;
            self.load_weights(&ModelSource::open(checkpoint.path())?, phase.progress())?;
            return Ok(None);
        }
        self.check_model(&checkpoint)?;
        let saved = read_state(&checkpoint)?;
        let optimizer = &saved.optimizer;
        if let Some(what) = self
            .core
            .other_optimizer(&checkpoint, optimizer, saved.progress)
        {
            let path = checkpoint.path().into();
            return Err(ResumeError::OtherOptimizer { path, what }.into());
        }
        self.check_reading(&checkpoint)?;
        let changes = self.changes(&checkpoint)?;
        let of_data = self.resume_samples(&checkpoint)?;
        self.core.fetch_chunks(&mut checkpoint)?;
        let amaxes = self.load(&checkpoint, phase.progress())?;
        Ok(Some(Resumed {
            progress: self.core.progress,
            other_run: self.core.other_run(&checkpoint),
            is_recorded: changes.is_some(),
            has_samples: saved.data_hash.is_some(),
            changes: of_data
                .into_iter()
                .chain(changes.unwrap_or_default())
                .collect(),
            conversions: self.conversions(&checkpoint, &saved, amaxes),
        }))
    }

    /// The keys that can change numbers and whose values have changed; `None` if nothing is
    /// recorded. A changed key that makes another run is an error.
    fn changes(&self, checkpoint: &Checkpoint) -> Result<Option<Vec<Change>>, TrainError> {
        let layout = self.core.groups.layout();
        changes_since(checkpoint, &self.core.config, &layout, &self.model_config)
    }

    /// Refuses a checkpoint of another model.
    fn check_model(&self, checkpoint: &Checkpoint) -> Result<(), TrainError> {
        check_model(checkpoint, &self.model_config)
    }

    /// Loads the weights of another model of the same sizes; nothing else changes.
    fn load_weights(
        &mut self,
        source: &ModelSource,
        progress: &PhaseProgress,
    ) -> Result<(), TrainError> {
        let model = self.take_model();
        let dtype = self.core.config.train.dtype.into();
        let plan = &self.core.plan;
        let model = self.core.optimizer.load_params(model, dtype, |path, _| {
            let data = source.local(path, plan)?;
            progress.add(data.as_bytes().len() as u64);
            Ok::<_, ModelError>(data)
        })?;
        self.core.model = Some(model);
        Ok(())
    }

    /// Reads what this rank keeps, one tensor at a time. After an error the trainer cannot be used.
    fn load(
        &mut self,
        checkpoint: &Checkpoint,
        progress: &PhaseProgress,
    ) -> Result<ResumedAmaxes, TrainError> {
        let TrainerState {
            progress: run,
            loss_scaler,
            last_load,
            amaxes,
            fallbacks,
            eval_losses,
            losses,
            rollbacks,
            imported,
            ..
        } = read_state(checkpoint)?;
        self.unset_weight_amaxes();
        self.core
            .load(checkpoint, run, loss_scaler.as_ref(), progress)?;
        self.resume_precision(fallbacks)?;
        let amaxes = self.resume_amaxes(amaxes)?;
        self.imported = imported;
        self.core.losses = LossWindow::of(losses);
        self.core.rollbacks = rollbacks;
        if self.core.groups.is_main() {
            self.core.eval_losses = eval_losses;
        }
        if last_load.len() == self.last_load.len() {
            self.last_load = last_load;
            self.log_last_load();
        }
        Ok(amaxes)
    }
}

/// The keys that can change numbers and whose values have changed since a checkpoint was written;
/// `None` if nothing is recorded.
///
/// # Errors
/// A changed key makes another run.
pub(crate) fn changes_since(
    checkpoint: &Checkpoint,
    config: &TrainConfig,
    layout: &Layout,
    model: &DecoderConfig,
) -> Result<Option<Vec<Change>>, TrainError> {
    let saved = match read_state(checkpoint)?.config {
        Value::Null => {
            let file = config_of(Path::new(&config.run.dir));
            let text = fs::read_to_string(file).ok();
            text.and_then(|text| record_of_file(&text, model))
        }
        saved => Some(saved),
    };
    let Some(saved) = saved else { return Ok(None) };
    let Changes { identity, numeric } = changes(&saved, &config.record(layout, model));
    match identity.first() {
        None => Ok(Some(numeric)),
        Some(Change { key, old, new }) => {
            let what = format!("is from another run: {key} is {old} there and {new} here");
            Err(ResumeError::Other {
                path: checkpoint.path().into(),
                what,
            }
            .into())
        }
    }
}

/// Refuses a checkpoint of another model than `model`.
///
/// # Errors
/// The first field in which they differ.
pub(crate) fn check_model(
    checkpoint: &Checkpoint,
    model: &DecoderConfig,
) -> Result<(), TrainError> {
    let mut mine = json!(model);
    if !model.learns_positions() {
        // The length of sequences is not part of the weights.
        mine.as_object_mut()
            .map(|fields| fields.remove("max_seq_len"));
    }
    difference(checkpoint.model(), &mine).map_or(Ok(()), |difference| {
        let path = checkpoint.path().into();
        let what = format!("is from another model: {difference}");
        Err(ResumeError::Other { path, what }.into())
    })
}

pub(crate) fn read_state(checkpoint: &Checkpoint) -> Result<TrainerState, TrainError> {
    state_of(checkpoint.trainer()).map_err(|error| {
        let what = format!("has a trainer state that this version does not support: {error}");
        ResumeError::Other {
            path: checkpoint.path().to_path_buf(),
            what,
        }
        .into()
    })
}

fn state_of(trainer: &Value) -> Result<TrainerState, serde_json::Error> {
    let state: TrainerState = serde_json::from_value(trainer.clone())?;
    match (state.data_hash, state.imported) {
        (None, None) => Err(serde_json::Error::missing_field("data_hash")),
        _ => Ok(state),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{trainer::ImportedFrom, trainer_core::Progress};

    #[test]
    fn a_state_from_before_there_were_skips_is_read() {
        let state = json!({
            "progress": {"step": 3, "consumed_samples": 24},
            "seed": 1, "seq_len": 8, "data_hash": 2, "num_train_samples": 100,
            "schedule": {"init": 0.0, "max": 0.1, "min": 0.0, "warmup_steps": 20, "decay_steps": 300},
        });
        let state = state_of(&state).unwrap();
        let progress = Progress {
            step: 3,
            consumed_samples: 24,
            ..Progress::default()
        };
        assert_eq!((state.progress, state.loss_scaler), (progress, None));
    }

    #[test]
    fn only_an_imported_state_may_be_without_the_hash_of_its_data() {
        let mut state = json!({
            "progress": {"step": 3, "consumed_samples": 24}, "seed": 1, "seq_len": 8,
        });
        let error = state_of(&state).unwrap_err();
        assert_eq!(error.to_string(), "missing field `data_hash`");
        state["imported"] = json!("megatron");
        assert_eq!(
            state_of(&state).unwrap().imported,
            Some(ImportedFrom::Megatron)
        );
        state["imported"] = json!("other");
        assert!(state_of(&state).is_err());
    }
}
