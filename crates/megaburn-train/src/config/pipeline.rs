//! The keys of `[parallel]` that configure a pipeline.

use megaburn_mesh::Layout;
use megaburn_pipeline::{LayerSplit, PipelineError, ScheduleConfig, ScheduleKind, StageLayers};

use super::{ParallelConfig, TrainConfig, TrainingConfig, require::require};
use crate::error::TrainError;

impl TrainConfig {
    /// The pipeline schedule of a step of the whole batch; `None` without a pipeline.
    ///
    /// # Errors
    /// The layout cannot split the batch.
    pub fn pipeline_schedule(&self, layout: &Layout) -> Result<Option<ScheduleConfig>, TrainError> {
        let num_micro_batches = self.train.num_micro_batches(layout.dp)?;
        let schedule = self.parallel.schedule(layout.pp, num_micro_batches);
        Ok((layout.pp > 1).then_some(schedule))
    }
}

impl ParallelConfig {
    /// The schedule of a step of `num_micro_batches` micro-batches on each of `pp` pipeline ranks.
    pub fn schedule(&self, pp: usize, num_micro_batches: usize) -> ScheduleConfig {
        if pp == 1 {
            // Without a pipeline: one forward, its backward, then the next micro-batch.
            let kind = ScheduleKind::OneForwardOneBackward;
            return ScheduleConfig::new(kind, 1, num_micro_batches);
        }
        self.wanted(pp, num_micro_batches)
    }

    fn wanted(&self, pp: usize, num_micro_batches: usize) -> ScheduleConfig {
        let kind = self.schedule.unwrap_or(match self.chunks {
            None | Some(1) => ScheduleKind::OneForwardOneBackward,
            Some(_) => ScheduleKind::Interleaved,
        });
        let num_chunks = self.chunks;
        let group_size = self.micro_batch_group;
        let config = ScheduleConfig::new(kind, pp, num_micro_batches);
        ScheduleConfig {
            num_chunks,
            group_size,
            ..config
        }
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

    /// The layers of each chunk of each pipeline rank, for a model of `num_layers` layers.
    ///
    /// # Errors
    /// The layers cannot be split that way.
    pub fn stages(
        &self,
        layout: &Layout,
        num_layers: usize,
    ) -> Result<Vec<Vec<StageLayers>>, TrainError> {
        if layout.pp == 1 {
            return Ok(vec![vec![StageLayers::whole(num_layers)]]);
        }
        let stages = self.schedule(layout.pp, 1).stages();
        let all = self.layer_split().stages(num_layers, stages.num_stages())?;
        Ok((0..layout.pp)
            .map(|rank| stages.chunks_of(rank, &all))
            .collect())
    }

    /// Checks that a model of `num_layers` layers can be split over the pipeline; with `pp = 1`,
    /// that it could be split over some pipeline.
    ///
    /// # Errors
    /// The layers cannot be split so: a stage has none, or more than there are.
    pub fn splits(&self, layout: &Layout, num_layers: usize) -> Result<(), TrainError> {
        let first = self.first_stage_layers.unwrap_or(0);
        let last = self.last_stage_layers;
        let rule = format!("at most the model's {num_layers} layers (model.layers)");
        require(
            first <= num_layers,
            "parallel.first_stage_layers",
            first,
            rule,
        )?;
        let left = num_layers - first;
        let last = last.unwrap_or(0);
        let rule = format!(
            "at most {left}: the model has {num_layers} layers (model.layers), and the first stage {first} of them (parallel.first_stage_layers)"
        );
        require(last <= left, "parallel.last_stage_layers", last, rule)?;
        let split = self.layer_split();
        match layout.pp {
            1 => Ok(split.check_layout(num_layers)?),
            pp => {
                let num_stages = self.schedule(pp, 1).stages().num_stages();
                Ok(split.stages(num_layers, num_stages).map(drop)?)
            }
        }
    }

    /// As [`splits`](Self::splits); also checks that every number of micro-batches has a valid
    /// schedule.
    pub(crate) fn pipelines(
        &self,
        layout: &Layout,
        num_layers: usize,
        train: &TrainingConfig,
    ) -> Result<(), TrainError> {
        self.splits(layout, num_layers)?;
        if layout.pp == 1 {
            return Ok(());
        }
        let mut micro_batches = train.all_num_micro_batches(layout.dp)?;
        Ok(micro_batches.try_for_each(|num| self.schedule(layout.pp, num).check())?)
    }

    pub(super) fn validate_pipeline(&self) -> Result<(), TrainError> {
        let is_alone = self.pipeline_layout.is_none()
            || LayerSplit {
                layout: None,
                ..self.layer_split()
            } == LayerSplit::default();
        if !is_alone {
            return Err(PipelineError::TwoSplits.into());
        }
        // Checked without a pipeline too: the keys are unused then, but wrong for any pipeline.
        Ok(self.wanted(2, 1).check_kind()?)
    }
}
