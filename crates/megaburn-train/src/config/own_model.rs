//! The sections of a run whose model is not a decoder: `[run]`, `[parallel]`, `[train]`,
//! `[optimizer]`, `[log]`, `[alerts]` and `[profile]`.

use megaburn_mesh::Layout;
use serde_json::{Value as Json, json};
use toml::{Table, Value};

use super::{
    ConfigLayers, TrainConfig,
    changes::{Change, Changes, changes},
    ranges,
    require::require,
    value::value_at,
};
use crate::{device::Devices, error::TrainError};

/// The sections that every run has.
pub(crate) const RUN_SECTIONS: [&str; 7] = [
    "run",
    "parallel",
    "train",
    "optimizer",
    "log",
    "alerts",
    "profile",
];

/// The keys of these sections that only a decoder has a use for.
const OF_DECODERS: &[&str] = &[
    "parallel.cp",
    "parallel.cp_comm",
    "parallel.cp_pad",
    "parallel.max_tokens_per_rank",
    "parallel.ep",
    "parallel.etp",
    "parallel.count_embedding",
    "parallel.count_loss",
    "train.attention",
    "train.fused_linear_cross_entropy",
    "train.hidden_dropout",
    "train.attention_dropout",
    "train.label_smoothing",
    "train.z_loss",
    "train.mtp_loss_scaling_factor",
    "train.log_max_attention_logit",
    "optimizer.decoupled_lr",
    "optimizer.decoupled_min_lr",
    "optimizer.qk_clip",
    "optimizer.qk_clip_alpha",
    "optimizer.qk_clip_threshold",
];

impl ConfigLayers {
    /// Builds the sections of a run whose model is not a decoder. `dir` is the folder of the run if
    /// `run.dir` is not set.
    ///
    /// # Errors
    /// A value that no run can use, or a key that only a decoder has a use for.
    pub(crate) fn load_for_own_model(self, dir: String) -> Result<TrainConfig, TrainError> {
        let mut config = self.read()?;
        let names_dir = value_at(self.merged(), "run.dir").is_some();
        if !names_dir {
            config.run.dir = dir;
        }
        let parallel = &mut config.parallel;
        parallel.tp.get_or_insert(1);
        parallel.sp.get_or_insert(false);
        config.validate_run_sections()?;
        Ok(config)
    }
}

impl TrainConfig {
    fn validate_run_sections(&self) -> Result<(), TrainError> {
        self.run.validate()?;
        ranges::check("run", &self.run)?;
        ranges::check("parallel", &self.parallel)?;
        self.parallel.validate_pipeline()?;
        ranges::check("train", &self.train)?;
        self.train.validate()?;
        ranges::check("optimizer", &self.optimizer)?;
        self.optimizer.validate(&self.train)?;
        self.validate_logs()?;
        let [mine, default] = [self, &Self::default()].map(Self::as_table);
        for &key in OF_DECODERS {
            let (mine, default) = (value_at(&mine, key), value_at(&default, key));
            let rule = "left out: only a decoder of megaburn has a use for it";
            let shown = mine.map_or("not set".to_string(), Value::to_string);
            require(mine == default, key, shown, rule)?;
        }
        Ok(())
    }

    /// The sections that every run has, as a table without the keys of decoders.
    pub(crate) fn run_sections(&self) -> Table {
        let mut table = self.as_table();
        table.retain(|name: &str, _| RUN_SECTIONS.contains(&name));
        for key in OF_DECODERS {
            let place = key.split_once('.');
            let section = place.and_then(|(section, _)| table.get_mut(section)?.as_table_mut());
            if let (Some(section), Some((_, name))) = (section, place) {
                section.remove(name);
            }
        }
        table
    }

    fn as_table(&self) -> Table {
        // What TOML cannot hold is refused before.
        Table::try_from(self).unwrap_or_default()
    }

    /// The record of these sections in a checkpoint, including what is derived from the ranks.
    pub(crate) fn record_of_sections(&self, layout: &Layout) -> Json {
        let mut resolved = self.clone();
        resolved.parallel.set_degrees(layout);
        resolved.optimizer.resolve_horizons(&self.train);
        json!(resolved.run_sections())
    }

    /// Refuses a layout that does not split the batch, or the ranks that shard together.
    ///
    /// # Errors
    /// As described; the error names the key.
    pub(crate) fn check_batch(&self, layout: &Layout) -> Result<(), TrainError> {
        self.parallel.shares(layout)?;
        let rule = "false: the loss of a model of your own counts all samples";
        require(!self.train.pad_batch, "train.pad_batch", true, rule)?;
        self.train.num_micro_batches(layout.dp).map(drop)
    }

    /// The layout of a run whose model is not a decoder. `world` is the number of ranks that a
    /// launcher started. Without one, and without `parallel.dp` and `parallel.ranks`, a run on the
    /// CPU has as few ranks as the other degrees allow.
    ///
    /// # Errors
    /// The layout is invalid, does not take `world` ranks, or `fits` refuses it.
    pub(crate) fn own_layout(
        &self,
        devices: Devices,
        world: Option<usize>,
        fits: impl Fn(&Layout) -> Result<(), TrainError>,
    ) -> Result<Layout, TrainError> {
        if let (Devices::Cuda { gpus }, None) = (devices, world) {
            return self.parallel.layout_on_gpus(gpus, fits);
        }
        let mut parallel = self.parallel.clone();
        if world.is_none() && parallel.ranks.is_none() {
            parallel.dp.get_or_insert(1);
        }
        let layout = parallel.layout(world)?;
        fits(&layout).map(|()| layout)
    }
}

/// The keys that differ between the records of two runs whose model is not a decoder. `saved` and
/// `mine` are their sections, with those of the task.
pub(crate) fn own_changes(saved: &Json, mine: &Json) -> Changes {
    let is_of_run = |name: &str| RUN_SECTIONS.contains(&name);
    let part = |record: &Json, of_run: bool| -> Json {
        let fields = record.as_object().cloned().unwrap_or_default();
        let kept = fields
            .into_iter()
            .filter(|(name, _)| is_of_run(name) == of_run);
        Json::Object(kept.collect())
    };
    let mut found = changes(&part(saved, true), &part(mine, true));
    let own = super::changes::differences(&part(saved, false), &part(mine, false));
    found.numeric.extend::<Vec<Change>>(own);
    found
}
