use std::{fs, ops::Range, path::Path};

use burn::tensor::DType;
use megaburn_checkpoint::{Checkpoint, prepare};
use megaburn_collective::{Phase, Progress as PhaseProgress};
use megaburn_models::{ModelError, source::ModelSource};
use megaburn_optim::Moment;
use serde::de::Error as _;
use serde_json::{Value, json};

use super::{
    conversions::Conversions, delayed_scales::ResumedAmaxes, owner::set_aside, save::TrainerState,
};
use crate::{
    config::{Change, Changes, changes, record_of_file},
    error::TrainError,
    resume_error::ResumeError,
    run_folder::config_of,
    start::settle,
    stored_checkpoints::StoredCheckpoints,
    trainer::{Progress, Trainer},
};

/// The state of a resumed run.
#[derive(Clone, Debug, PartialEq)]
pub struct Resumed {
    /// The progress before this start.
    pub progress: Progress,
    /// The other run that wrote the checkpoint, if it was copied into this run's folder.
    pub other_run: Option<String>,
    /// The keys that can change numbers and whose values differ from those that the checkpoint was
    /// trained with. The losses will then differ from those of an uninterrupted run.
    pub changes: Vec<Change>,
    /// Whether the configuration that the checkpoint was trained with is recorded, in it or in the
    /// run's `config.toml`.
    pub is_recorded: bool,
    /// Whether the checkpoint records the samples that it was trained on. If not, as in one that was
    /// made from a checkpoint of Megatron-Core, it is unknown whether this run continues with them.
    pub has_samples: bool,
    /// What the checkpoint holds in another form than this run.
    pub conversions: Conversions,
}

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
        self.resume_with(&StoredCheckpoints::none())
    }

    /// As [`resume`](Self::resume), from a checkpoint in the store if that is newer.
    ///
    /// # Errors
    /// As [`resume`](Self::resume); also the checkpoint in the store cannot be copied.
    /// # Collective
    /// All ranks.
    pub(crate) fn resume_with(
        &mut self,
        stored: &StoredCheckpoints,
    ) -> Result<Option<Resumed>, TrainError> {
        let phase = self.groups.world.phase(Phase::Load);
        let place = self.place();
        prepare(&place, &self.groups.world)?;
        let mut latest = self.find_newest(&place)?;
        if stored.has_newer(&latest) {
            if place.is_keeper(&self.groups.world) {
                set_aside(&latest.refused);
            }
            stored.fetch(&latest, &place, &self.groups)?;
            latest = self.find_newest(&place)?;
        }
        let Some(mut checkpoint) = latest.checkpoint else {
            // Do not start from scratch next to damaged checkpoints: the new run's would take their
            // place.
            return match latest.refused.into_iter().next() {
                Some(refused) => Err(ResumeError::AllDamaged {
                    path: refused.path,
                    why: refused.why,
                }
                .into()),
                None => {
                    self.check_never_saved(&place)?;
                    Ok(None)
                }
            };
        };
        let progress_is_kept = if self.groups.is_main() {
            self.check_local_owner(&checkpoint)
                .and_then(|()| self.check_own_progress(&checkpoint))
        } else {
            Ok(())
        };
        settle(&self.groups.world, progress_is_kept)?;
        if place.is_keeper(&self.groups.world) {
            set_aside(&latest.refused);
        }
        if checkpoint.trainer().is_null() {
            // An imported model that was put there: it has weights only.
            self.check_model(&checkpoint)?;
            self.load_weights(&ModelSource::open(checkpoint.path())?, phase.progress())?;
            return Ok(None);
        }
        self.check_model(&checkpoint)?;
        self.check_optimizer(&checkpoint)?;
        self.check_reading(&checkpoint)?;
        let changes = self.changes(&checkpoint)?;
        let of_data = self.resume_samples(&checkpoint)?;
        let needed = self.chunks_of(&checkpoint);
        checkpoint.fetch(&place, &self.groups.world, &needed)?;
        let amaxes = self.load(&checkpoint, phase.progress())?;
        let saved = read_state(&checkpoint)?;
        Ok(Some(Resumed {
            progress: self.progress,
            other_run: self.other_run(&checkpoint),
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
        let saved = match read_state(checkpoint)?.config {
            Value::Null => {
                let file = config_of(Path::new(&self.config.run.dir));
                let text = fs::read_to_string(file).ok();
                text.and_then(|text| record_of_file(&text, &self.model_config))
            }
            saved => Some(saved),
        };
        let Some(saved) = saved else { return Ok(None) };
        let mine = self
            .config
            .record(&self.groups.layout(), &self.model_config);
        let Changes { identity, numeric } = changes(&saved, &mine);
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

    /// Refuses a checkpoint of another model.
    fn check_model(&self, checkpoint: &Checkpoint) -> Result<(), TrainError> {
        let mut mine = json!(self.model_config);
        if !self.model_config.learns_positions() {
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

    /// Refuses a checkpoint that lacks state which this run's optimizer keeps.
    fn check_optimizer(&self, checkpoint: &Checkpoint) -> Result<(), TrainError> {
        let TrainerState {
            optimizer: saved,
            progress,
            ..
        } = read_state(checkpoint)?;
        let mine = self.optimizer.name();
        let names = &checkpoint.manifest().tensors;
        let has = |moment: &Moment| {
            names
                .keys()
                .any(|name| name.split('.').next() == Some(moment.name()))
        };
        let mut moments = self.optimizer.moments(&self.grads).into_iter();
        let lacks = moments.find(|moment| !has(moment));
        let lacks = lacks.filter(|_| progress.step > progress.skipped_steps);
        let what = match (saved == mine, lacks) {
            (true, None) => return Ok(()),
            (true, Some(moment)) => {
                format!("lacks the state {} of optimizer.name {mine}", moment.name())
            }
            (false, _) => format!(
                "was trained with another optimizer: optimizer.name is {saved} there and {mine} here"
            ),
        };
        Err(ResumeError::OtherOptimizer {
            path: checkpoint.path().into(),
            what,
        }
        .into())
    }

    /// Loads the weights of another model of the same sizes; nothing else changes.
    fn load_weights(
        &mut self,
        source: &ModelSource,
        progress: &PhaseProgress,
    ) -> Result<(), TrainError> {
        let model = self.take_model();
        let dtype = self.config.train.dtype.into();
        let plan = &self.plan;
        let model = self.optimizer.load_params(model, dtype, |path, _| {
            let data = source.local(path, plan)?;
            progress.add(data.as_bytes().len() as u64);
            Ok::<_, ModelError>(data)
        })?;
        self.model = Some(model);
        Ok(())
    }

    /// Reads what this rank keeps, one tensor at a time. After an error the trainer cannot be used.
    fn load(
        &mut self,
        checkpoint: &Checkpoint,
        progress: &PhaseProgress,
    ) -> Result<ResumedAmaxes, TrainError> {
        let model = self.take_model();
        let plan = &self.plan;
        let read = |prefix: &str, path: &str, range: Range<usize>| {
            let shard = &plan.get(path).expect("the plan was validated").shard;
            let data =
                checkpoint.read_range(&format!("{prefix}.{path}"), shard, range, DType::F32)?;
            progress.add(data.as_bytes().len() as u64);
            Ok::<_, TrainError>(data)
        };
        let TrainerState {
            progress,
            loss_scaler,
            last_load,
            amaxes,
            fallbacks,
            eval_losses,
            imported,
            ..
        } = read_state(checkpoint)?;
        let updates = progress.step - progress.skipped_steps;
        self.optimizer
            .load_state(updates, &self.grads, |path, moment, range| {
                read(moment.name(), path, range)
            })?;
        let dtype = self.config.train.dtype.into();
        let model = self
            .optimizer
            .restore_params(model, dtype, |path, range| read("model", path, range))?;
        self.model = Some(model);
        if let (Some(mine), Some(saved)) = (&mut self.loss_scaler, loss_scaler) {
            mine.resume(&saved);
        }
        self.progress = progress;
        self.resume_precision(fallbacks)?;
        let amaxes = self.resume_amaxes(amaxes)?;
        self.imported = imported;
        if self.groups.is_main() {
            self.eval_losses = eval_losses;
        }
        if last_load.len() == self.last_load.len() {
            self.last_load = last_load;
            self.log_last_load();
        }
        Ok(amaxes)
    }
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

/// The first field in which two objects differ, as text for people.
fn difference(saved: &Value, mine: &Value) -> Option<String> {
    let fields = mine.as_object()?;
    let differs = |(name, value): &(&String, &Value)| saved.get(name.as_str()) != Some(value);
    let (name, value) = fields.iter().find(differs)?;
    let saved = saved
        .get(name)
        .map_or("missing".to_string(), Value::to_string);
    Some(format!("{name} is {saved} there and {value} here"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trainer::ImportedFrom;

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
