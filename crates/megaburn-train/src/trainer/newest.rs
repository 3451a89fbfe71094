//! Finds the checkpoint to resume from, and the files of it that this rank needs.

use std::{collections::BTreeSet, fs, path::Path};

use megaburn_checkpoint::{Checkpoint, CheckpointError, Latest, Place, find_latest, newest};
use megaburn_collective::objects;
use toml::Table;

use crate::{
    error::TrainError,
    run_folder::{config_of, names::CHECKPOINTS},
    trainer::Trainer,
};

impl Trainer {
    /// The newest intact checkpoint: in `place`, or in the run's folder if that has a newer one.
    ///
    /// # Collective
    /// All ranks.
    pub(super) fn find_newest(&self, place: &Place) -> Result<Latest, TrainError> {
        let world = &self.groups.world;
        if self.groups.is_main() {
            self.warn_of_other_place();
        }
        let latest = find_latest(place, world)?;
        if place.hosts().is_none() {
            return Ok(latest);
        }
        // The run may have saved into its own folder before.
        let own = Path::new(&self.config.run.dir).join(CHECKPOINTS);
        let step = |latest: &Latest| latest.checkpoint.as_ref().map(Checkpoint::step);
        let of_own = match self.groups.is_main() {
            true => newest(&own).ok().and_then(|latest| step(&latest)),
            false => None,
        };
        let of_own: Option<u64> = objects::broadcast(world, &of_own)?;
        if of_own <= step(&latest) {
            return Ok(latest);
        }
        if self.groups.is_main() {
            tracing::info!(
                "`{}` has a newer checkpoint than the folders of the hosts",
                own.display()
            );
        }
        Ok(find_latest(&own, world)?)
    }

    /// Says where the last start of this run saved, if this one looks elsewhere.
    fn warn_of_other_place(&self) {
        let text = fs::read_to_string(config_of(Path::new(&self.config.run.dir)));
        let last = text.ok().and_then(|text| text.parse::<Table>().ok());
        let last = last.as_ref().and_then(|last| last.get("train"));
        let last = last.and_then(|train| train.get("local_checkpoint_dir")?.as_str());
        let mine = self.config.train.local_checkpoint_dir.as_deref();
        if let Some(last) = last.filter(|last| Some(*last) != mine) {
            tracing::warn!(
                "the last start of this run saved to `{last}` on each host; checkpoints there are \
                not found unless train.local_checkpoint_dir names it"
            );
        }
    }

    /// The files of a checkpoint that this rank reads from to resume.
    pub(super) fn files_of(&self, checkpoint: &Checkpoint) -> BTreeSet<usize> {
        let no_values = |_, name, _| {
            let why = "no values are needed".to_string();
            Err(CheckpointError::Source { name, why })
        };
        let mut files = BTreeSet::new();
        for tensor in self.held_tensors(no_values) {
            let all = 0..tensor.shard.local_shape().iter().product();
            // Weights are read whole, also where a rank updates only a part of them.
            let is_weight = tensor.name.starts_with("model.");
            let range = if is_weight { all } else { tensor.range.clone() };
            files.extend(checkpoint.files_of(&tensor.name, tensor.shard, range));
        }
        files
    }
}
