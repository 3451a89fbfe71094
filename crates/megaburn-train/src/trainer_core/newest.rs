//! Finds the checkpoint to resume from, and the chunks of it that this rank needs.

use std::{
    fs,
    path::{Path, PathBuf},
};

use burn::module::Module;
use megaburn_checkpoint::{Checkpoint, Latest, NeededChunks, Place, checkpoint_step, find_latest};
use megaburn_collective::objects;
use toml::Table;

use crate::{
    error::TrainError,
    report::saved_steps,
    resume_error::ResumeError,
    run_folder::{config_of, names::CHECKPOINTS},
    start::settle,
    trainer_core::TrainerCore,
};

impl<M: Module> TrainerCore<M> {
    /// The newest intact checkpoint: in `place`, or in the run's folder if that has a newer one.
    ///
    /// # Collective
    /// All ranks.
    pub(crate) fn find_newest(&self, place: &Place) -> Result<Latest, TrainError> {
        let world = &self.groups.world;
        if let (true, Some(last)) = (self.groups.is_main(), self.other_place()) {
            tracing::warn!(
                "the last start of this run saved to `{last}` on each host; checkpoints there are \
                not found unless train.local_checkpoint_dir names it"
            );
        }
        let latest = find_latest(place, world)?;
        if place.hosts().is_none() {
            return Ok(latest);
        }
        // The run may have saved into its own folder before.
        let own = self.own_checkpoints();
        let step = |latest: &Latest| latest.checkpoint.as_ref().map(Checkpoint::step);
        let is_newer = match (self.groups.is_main(), step(&latest)) {
            (true, local) => has_newer(&own, local),
            (false, _) => Ok(false),
        };
        let is_newer: bool = objects::broadcast(world, &settle(world, is_newer)?)?;
        if !is_newer {
            return Ok(latest);
        }
        let of_run = find_latest(&own, world)?;
        let (mut chosen, other) = if step(&of_run) > step(&latest) {
            if self.groups.is_main() {
                tracing::warn!(
                    "`{}` has a newer checkpoint than the folders of the hosts, which is used",
                    own.display()
                );
            }
            (of_run, latest)
        } else {
            (latest, of_run)
        };
        chosen.refused.extend(other.refused);
        Ok(chosen)
    }

    fn own_checkpoints(&self) -> PathBuf {
        Path::new(&self.config.run.dir).join(CHECKPOINTS)
    }

    /// The folder of each host that the last start of this run saved to, if this one looks elsewhere.
    fn other_place(&self) -> Option<String> {
        let text = fs::read_to_string(config_of(Path::new(&self.config.run.dir)));
        let last: Table = text.ok()?.parse().ok()?;
        let last = last.get("train")?.get("local_checkpoint_dir")?.as_str()?;
        let mine = self.config.train.local_checkpoint_dir.as_deref();
        (Some(last) != mine).then(|| last.to_string())
    }

    /// Fails if the run has saved, but no checkpoint was found because the folders of the hosts are
    /// other ones now.
    pub(crate) fn check_never_saved(&self, place: &Place) -> Result<(), TrainError> {
        let place = match (self.other_place(), place.hosts()) {
            (None, None) => return Ok(()),
            (Some(last), _) => format!("`{}`, unlike `{last}`,", place.dir().display()),
            (None, Some(hosts)) => format!(
                "`{}` of the hosts {} (MEGABURN_HOST gives a host another name)",
                place.dir().display(),
                hosts.names().join(", ")
            ),
        };
        match saved_steps(Path::new(&self.config.run.dir)).next_back() {
            Some(step) => Err(ResumeError::NoneFound { step, place }.into()),
            None => Ok(()),
        }
    }

    /// The chunks of a checkpoint that this rank reads to resume.
    pub(crate) fn chunks_of(&self, checkpoint: &Checkpoint) -> NeededChunks {
        let mut chunks = NeededChunks::default();
        for (path, spec) in self.plan.iter() {
            let mut add = |prefix: &str, range| {
                let name = format!("{prefix}.{path}");
                checkpoint.add_needed(&mut chunks, &name, &spec.shard, range);
            };
            let mut weight = 0..spec.shard.local_shape().iter().product();
            // There is no state before the first step or before it is loaded.
            let dtype = self.config.train.dtype.into();
            for state in self.optimizer.state_shapes(path, spec, dtype) {
                match state.moment {
                    Some(moment) => add(moment.name(), state.range),
                    // Weights are read whole, unless the rank keeps only a part of them.
                    None if self.sharding.is_param_sharded(path) => weight = state.range,
                    None => {}
                }
            }
            add("model", weight);
        }
        chunks
    }
}

/// Whether a folder has a checkpoint of a later step, intact or not.
fn has_newer(folder: &Path, step: Option<u64>) -> Result<bool, TrainError> {
    let unreadable = |source| TrainError::Read {
        path: folder.to_path_buf(),
        source,
    };
    let mut newest = None;
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        entries => entries.map_err(unreadable)?,
    };
    for entry in entries {
        let name = entry.map_err(unreadable)?.file_name();
        newest = newest.max(name.to_str().and_then(checkpoint_step));
    }
    Ok(newest > step)
}
