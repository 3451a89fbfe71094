//! The configuration of a task's run.

use std::sync::Arc;

use megaburn_mesh::Layout;
use serde::Serialize;
use serde_json::{Value as Json, json};
use toml::Table;

use super::{data::TaskData, error::TaskRunError, stage::PipelineSplit, train_task::TrainTask};
use crate::{
    config::{TrainConfig, require},
    device::Devices,
    error::TrainError,
};

/// The configuration of a run that trains a task: the sections `[run]`, `[parallel]`, `[train]` and
/// `[optimizer]`, which every run has, and those of the task.
#[derive(Clone, Debug)]
pub struct TaskConfig<C> {
    /// The sections of every run. Those about decoders and their data are not used.
    pub run: Arc<TrainConfig>,
    /// The sections of the task.
    pub task: C,
}

impl<C: Serialize> TaskConfig<C> {
    /// The configuration as TOML, with every default spelled out.
    pub fn to_toml(&self) -> String {
        let mut table = self.own_table();
        table.extend(self.run.run_sections());
        table.to_string()
    }

    /// The sections of the task.
    pub(super) fn own_table(&self) -> Table {
        Table::try_from(&self.task).unwrap_or_default()
    }

    /// The record of the configuration in a checkpoint.
    pub(super) fn record(&self, layout: &Layout) -> Json {
        let mut record = json!(self.own_table());
        let sections = self.run.record_of_sections(layout);
        if let (Some(all), Json::Object(sections)) = (record.as_object_mut(), sections) {
            all.extend(sections);
        }
        record
    }

    /// The layout of a run of `task` on the devices of this host. `world` is the number of ranks that
    /// a launcher started.
    ///
    /// # Errors
    /// The layout is invalid, does not take `world` ranks, or does not split the batch or the model.
    pub fn layout_of<T: TrainTask<Config = C>>(
        &self,
        task: &T,
        devices: Devices,
        world: Option<usize>,
    ) -> Result<Layout, TrainError> {
        let split = task.pipeline(&self.task, self.run.train.micro_batch);
        self.layout(devices, world, (&task.name(), split.as_ref()))
    }

    /// The layout of the run on the devices of this host. `world` is the number of ranks that a
    /// launcher started. `task` is the name of the task, and `split` what it says of pipelines.
    ///
    /// # Errors
    /// The layout is invalid, does not take `world` ranks, or does not split the batch or the model.
    pub(super) fn layout(
        &self,
        devices: Devices,
        world: Option<usize>,
        (task, split): (&str, Option<&PipelineSplit>),
    ) -> Result<Layout, TrainError> {
        let fits = |layout: &Layout| self.check_layout(layout, (task, split));
        self.run.own_layout(devices, world, fits)
    }

    /// Refuses a layout that does not split the batch or the model.
    pub(super) fn check_layout(
        &self,
        layout: &Layout,
        (task, split): (&str, Option<&PipelineSplit>),
    ) -> Result<(), TrainError> {
        for (key, degree) in [
            ("parallel.cp", layout.cp),
            ("parallel.ep", layout.ep),
            ("parallel.etp", layout.etp),
        ] {
            let rule = "1: only a decoder of megaburn is split that way";
            require(degree == 1, key, degree, rule)?;
        }
        self.run.check_batch(layout)?;
        let Some(split) = split else {
            let rule = format!(
                "1: `{task}` does not name the blocks of its model, which TrainTask::pipeline does"
            );
            return require(layout.pp == 1, "parallel.pp", layout.pp, rule);
        };
        let parallel = &self.run.parallel;
        if layout.pp > 1 {
            let num_stages = parallel.schedule(layout.pp, 1).stages().num_stages();
            let num_blocks = split.num_blocks;
            let rule = format!(
                "smaller, or `{task}` needs more blocks: each of the {num_stages} stages needs one, \
                and there are {num_blocks}"
            );
            require(num_blocks >= num_stages, "parallel.pp", layout.pp, rule)?;
        }
        parallel.pipelines(layout, split.num_blocks, &self.run.train)
    }

    /// Refuses data that cannot be trained or evaluated on.
    pub(super) fn check_data<B>(&self, data: &TaskData<B>) -> Result<(), TrainError> {
        let train = data.train.num_samples();
        let global_batch = self.run.train.global_batch;
        let too_few = data.valid.as_ref().map(|valid| valid.num_samples());
        let too_few = too_few.filter(|samples| *samples < global_batch);
        let why = match (train, too_few) {
            (0, _) => "there are no training samples".to_string(),
            (_, Some(samples)) => format!(
                "there are {samples} validation samples: an evaluation needs train.global_batch = \
                {global_batch} or more"
            ),
            (_, None) => return Ok(()),
        };
        Err(TaskRunError::cannot("use its data", why).into())
    }
}
