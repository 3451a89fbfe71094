//! Finds a checkpoint to resume from, and reads what this rank keeps of it.

use std::ops::Range;

use burn::{module::Module, tensor::DType};
use megaburn_checkpoint::{Checkpoint, prepare};
use megaburn_collective::Progress as PhaseProgress;
use megaburn_mesh::Layout;
use megaburn_optim::{LossScaler, Moment};
use serde_json::Value;

use super::{Progress, TrainerCore, owner::set_aside};
use crate::{
    error::TrainError, resume_error::ResumeError, start::settle,
    stored_checkpoints::StoredCheckpoints,
};

impl<M: Module> TrainerCore<M> {
    /// The newest intact checkpoint of the run, if it has one, which may come from the store.
    /// Damaged ones are set aside.
    ///
    /// # Errors
    /// All checkpoints are damaged, the newest intact one is another run's while this run has older
    /// ones of its own, or one in the store cannot be copied.
    /// # Collective
    /// All ranks.
    pub(crate) fn find_checkpoint(
        &self,
        stored: &StoredCheckpoints,
    ) -> Result<Option<Checkpoint>, TrainError> {
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
        let Some(checkpoint) = latest.checkpoint else {
            // Do not start from scratch next to damaged checkpoints: the new run's would take their
            // place.
            return match latest.refused.into_iter().next() {
                Some(refused) => Err(ResumeError::AllDamaged {
                    path: refused.path,
                    why: refused.why,
                }
                .into()),
                None => {
                    self.check_may_begin(&place)?;
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
        Ok(Some(checkpoint))
    }

    /// Copies what this rank reads of a checkpoint to its host, if that has a folder of its own.
    ///
    /// # Errors
    /// A chunk cannot be copied.
    /// # Collective
    /// All ranks.
    pub(crate) fn fetch_chunks(&self, checkpoint: &mut Checkpoint) -> Result<(), TrainError> {
        let needed = self.chunks_of(checkpoint);
        checkpoint.fetch(&self.place(), &self.groups.world, &needed)?;
        Ok(())
    }

    /// Why a checkpoint lacks state that this run's optimizer keeps, if it does. `saved` is the name of
    /// the optimizer that wrote it.
    pub(crate) fn other_optimizer(
        &self,
        checkpoint: &Checkpoint,
        saved: &str,
        progress: Progress,
    ) -> Option<String> {
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
        match (saved == mine, lacks) {
            (true, None) => None,
            (true, Some(moment)) => Some(format!(
                "lacks the state {} of optimizer.name {mine}",
                moment.name()
            )),
            (false, _) => Some(format!(
                "was trained with another optimizer: optimizer.name is {saved} there and {mine} here"
            )),
        }
    }

    /// The layout and the ZeRO stage of a checkpoint, if they are not those of this run.
    pub(crate) fn other_layout(&self, checkpoint: &Checkpoint) -> Option<String> {
        let written = checkpoint.manifest().layout.as_str();
        let zero = checkpoint.trainer()["config"]["parallel"]["zero"].as_u64();
        let is_same_zero = zero.is_none_or(|zero| zero == u64::from(self.config.parallel.zero));
        let is_same = written
            .parse::<Layout>()
            .is_ok_and(|written| written == self.groups.layout());
        if is_same && is_same_zero {
            return None;
        }
        Some(match zero {
            Some(zero) => format!("{written} with parallel.zero {zero}"),
            None => written.to_string(),
        })
    }

    /// Reads what this rank keeps, one tensor at a time. After an error the trainer cannot be used.
    ///
    /// # Errors
    /// A tensor that cannot be read.
    pub(crate) fn load(
        &mut self,
        checkpoint: &Checkpoint,
        run: Progress,
        loss_scaler: Option<&LossScaler>,
        progress: &PhaseProgress,
    ) -> Result<(), TrainError> {
        let model = self.take_model();
        let plan = &self.plan;
        let read = |prefix: &str, path: &str, range: Range<usize>| {
            let shard = &plan.get(path).expect("the plan was validated").shard;
            let data =
                checkpoint.read_range(&format!("{prefix}.{path}"), shard, range, DType::F32)?;
            progress.add(data.as_bytes().len() as u64);
            Ok::<_, TrainError>(data)
        };
        let updates = run.step - run.skipped_steps;
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
            mine.resume(saved);
        }
        self.progress = run;
        Ok(())
    }
}

/// The first field in which two objects differ, as text for people.
pub(crate) fn difference(saved: &Value, mine: &Value) -> Option<String> {
    let fields = mine.as_object()?;
    let differs = |(name, value): &(&String, &Value)| saved.get(name.as_str()) != Some(value);
    let (name, value) = fields.iter().find(differs)?;
    let saved = saved
        .get(name)
        .map_or("missing".to_string(), Value::to_string);
    Some(format!("{name} is {saved} there and {value} here"))
}
