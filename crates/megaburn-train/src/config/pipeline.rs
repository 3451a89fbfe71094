//! The keys of `[parallel]` that say how a pipeline works.

use megaburn_mesh::Layout;
use megaburn_pipeline::{LayerSplit, PipelineError, ScheduleConfig, ScheduleKind};

use super::{LoopConfig, ParallelConfig, check::require};
use crate::TrainError;

impl ParallelConfig {
    /// The schedule of a step of so many micro-batches on each of `pp` ranks.
    pub(crate) fn schedule(&self, pp: usize, num_micro_batches: usize) -> ScheduleConfig {
        if pp == 1 {
            // One forward, its backward, and the next.
            let kind = ScheduleKind::OneForwardOneBackward;
            return ScheduleConfig::new(kind, 1, num_micro_batches);
        }
        let kind = self.schedule.unwrap_or(match self.chunks {
            None | Some(1) => ScheduleKind::OneForwardOneBackward,
            Some(_) => ScheduleKind::Interleaved,
        });
        let (num_chunks, group_size) = (self.chunks, self.micro_batch_group);
        let config = ScheduleConfig::new(kind, pp, num_micro_batches);
        ScheduleConfig { num_chunks, group_size, ..config }
    }

    /// How the layers are split over stages.
    pub(crate) fn layer_split(&self) -> LayerSplit {
        LayerSplit {
            layout: self.pipeline_layout.clone(),
            first: self.first_stage_layers,
            last: self.last_stage_layers,
            count_embedding: self.count_embedding,
            count_loss: self.count_loss,
        }
    }

    /// Whether a model of so many layers can be split over the pipeline.
    pub(crate) fn splits(&self, layout: &Layout, num_layers: usize) -> Result<(), TrainError> {
        if layout.pp == 1 {
            return Ok(());
        }
        let stages = self.schedule(layout.pp, 1).stages();
        Ok(self.layer_split().stages(num_layers, stages.num_stages()).map(drop)?)
    }

    /// The same, and whether its batches go through it.
    pub(crate) fn pipelines(
        &self,
        layout: &Layout,
        num_layers: usize,
        train: &LoopConfig,
    ) -> Result<(), TrainError> {
        self.splits(layout, num_layers)?;
        if layout.pp == 1 {
            return Ok(());
        }
        let mut micro_batches = train.all_num_micro_batches(layout.dp)?;
        Ok(micro_batches.try_for_each(|num| self.schedule(layout.pp, num).check())?)
    }

    pub(super) fn validate_pipeline(&self) -> Result<(), TrainError> {
        if self.schedule == Some(ScheduleKind::ForwardOnly) {
            let rule = "one that trains: gpipe, 1f1b, interleaved, zb-h1 or zb-v";
            return require(false, "parallel.schedule", ScheduleKind::ForwardOnly, rule);
        }
        let sizes = [
            ("parallel.chunks", self.chunks),
            ("parallel.micro_batch_group", self.micro_batch_group),
        ];
        for (key, size) in sizes {
            let size = size.unwrap_or(1);
            require((1..=usize::from(u16::MAX)).contains(&size), key, size, "from 1 to 65535")?;
        }
        let is_alone = self.pipeline_layout.is_none()
            || LayerSplit { layout: None, ..self.layer_split() } == LayerSplit::default();
        if is_alone { Ok(()) } else { Err(PipelineError::TwoSplits.into()) }
    }
}
