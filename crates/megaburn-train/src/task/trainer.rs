//! The trainer of one rank for a task.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use burn::prelude::Device;
use megaburn_collective::{ProcessGroups, objects};
use megaburn_data::EpochOrder;
use megaburn_mesh::ShardPlan;
use megaburn_optim::{DeviceScalar, GradNorm, LossScaler};
use megaburn_parallel::lazy_params;
use megaburn_pipeline::{P2pSpec, StageLayers, run};
use megaburn_report::metrics::{EvalMetrics, StepMetrics};

use super::{
    config::TaskConfig,
    data::TaskData,
    error::TaskRunError,
    model::TrainModel,
    passes::Training,
    place::ModelPlace,
    stage::{PipelineSplit, Stage},
    totals::Totals,
    train_task::TrainTask,
};
use crate::{
    config::TrainConfig,
    error::TrainError,
    pipeline::Pipeline,
    resumed::Resumed,
    run_trainer::RunTrainer,
    stored_checkpoints::StoredCheckpoints,
    train_state::{TrainState, TrainStateShape},
    trainer_core::{Outcome, Progress, Schedules, TrainerCore, with_diagnosis},
};

/// What [`TrainTask::model`] does.
const BUILD: &str = "build its model";

/// The data of a task.
pub(super) type DataOf<T> = TaskData<<<T as TrainTask>::Model as TrainModel>::Batch>;

/// The training state of one rank for a task: the counterpart of [`Trainer`](crate::Trainer) for any
/// model. [`train_task`](super::train_task()) runs one; a custom loop calls [`step`](Self::step).
#[derive(Debug)]
pub struct ModelTrainer<T: TrainTask> {
    pub(super) core: TrainerCore<T::Model>,
    pub(super) config: TaskConfig<T::Config>,
    pub(super) name: String,
    pub(super) data: Arc<DataOf<T>>,
    pub(super) order: EpochOrder,
    pub(super) stages: Vec<Stage>,
    /// The chunk, which is one of the stages, that each parameter belongs to.
    chunks: BTreeMap<String, usize>,
    /// The shape of the tensor between two stages.
    pub(super) shape: [usize; 3],
}

impl<T: TrainTask> ModelTrainer<T> {
    /// A trainer at step 0. `groups` determines the layout; the one in `config` is ignored.
    ///
    /// # Errors
    /// The layout does not split the model or the batch, the data has no samples, the device cannot
    /// compute in `train.dtype`, or the task fails.
    /// # Collective
    /// No communication.
    pub fn new(
        task: &T,
        config: TaskConfig<T::Config>,
        groups: ProcessGroups,
        device: Device,
        data: Arc<DataOf<T>>,
    ) -> Result<Self, TrainError> {
        let train = config.run.clone();
        let split = task.pipeline(&config.task, train.train.micro_batch);
        config.check_layout(&groups.layout(), (&task.name(), split.as_ref()))?;
        config.check_data(&data)?;
        train.check_device(&device)?;
        // Without a pipeline the model is one stage.
        let split = split.unwrap_or_else(|| PipelineSplit::new(0, [0; 3]));
        let pipeline = Pipeline::of_layers(
            &train.parallel,
            split.num_blocks,
            |layers: &StageLayers| split.tied_in(layers),
            train.train.dtype,
            &groups,
        )?;
        let stages: Vec<Stage> = pipeline.chunks().iter().map(Stage::from).collect();
        let place = ModelPlace {
            groups: &groups,
            device: &device,
            stages: &stages,
        };
        let model = task.model(&config.task, &place);
        let model = model.map_err(|why| TaskRunError::cannot(BUILD, why))?;
        let paths = lazy_params(&model).into_iter().map(|param| param.path);
        let chunks = split.chunks(paths.collect(), &stages);
        let state = state(&train, pipeline, model, &chunks, &split, &groups)?;
        let schedules = Schedules::of(&train)?;
        Ok(Self {
            order: data.order(train.run.seed),
            core: TrainerCore::new(train, groups, device, schedules, state)?,
            config,
            name: task.name(),
            data,
            stages,
            chunks,
            shape: split.shape,
        })
    }

    /// One optimizer step over the next global batch. A step whose gradient norm exceeds
    /// `optimizer.grad_norm_skip_threshold`, or overflowed f16, is skipped.
    ///
    /// # Errors
    /// As [`Trainer::step`](crate::Trainer::step); also those of the task.
    /// # Collective
    /// All ranks.
    pub fn step(&mut self) -> Result<StepMetrics, TrainError> {
        self.undiagnosed_step()
            .map_err(|error| self.with_origin(error))
    }

    /// As [`step`](Self::step), without the search for the origin of a step that is not finite.
    pub(super) fn undiagnosed_step(&mut self) -> Result<StepMetrics, TrainError> {
        let started = Instant::now();
        let samples = self.core.next_batch().global_batch_size() as u64;
        self.core.begin_layer_statistics();
        let (totals, factor) = self.forward_backward(true)?;

        // Sum the gradients over the ranks; make them means over items.
        let reduce = self.core.part("reduce");
        self.core.reduce_grads()?;
        let work = totals.work_over(&self.core.groups.batch)?;
        let num_items = work.num_items;
        self.core.grads.scale(1.0 / (factor * num_items.max(1.0)));
        let counted = self.core.count_gradients()?;
        let norm = self.core.grads.norm()?;
        let sums = totals.sum_over(&self.core.groups.batch, &self.core.device)?;
        self.core.own_losses = Some(sums.own_losses.clone());
        drop(reduce);

        // Clip and update; the device skips it if loss or gradient is not finite.
        let rates = self.core.next_rates(samples);
        let num_zeros = self.core.num_zeros()?;
        self.core.grads.skip_if_not_finite(&sums.loss);
        self.core.skip_spike(&sums.loss, num_items);
        let update = self.core.part("update");
        self.core.clip(&norm);
        self.core.update_weights(&rates)?;
        drop(update);
        self.core.enqueued = started.elapsed();

        // The host has only enqueued so far; here it waits for the device.
        let outcome = self.core.read_outcome(&sums.loss, &norm, num_items)?;
        let loss_scale = self.core.loss_scaler.as_ref().map(LossScaler::scale);
        let agreed = self.core.check_ranks_agree(outcome, started.elapsed())?;
        self.core.advance(samples, num_items as u64, outcome)?;
        let params_norm = self.core.params_norm()?;
        self.core.end_layer_statistics(counted)?;

        let Outcome {
            loss,
            grad_norm,
            is_update,
            ..
        } = outcome;
        let num_zeros = self.core.read_if_logged(num_zeros, DeviceScalar::read)?;
        let params_norm = self.core.read_if_logged(params_norm, GradNorm::read)?;
        let num_ranks = self.core.groups.world.size() as f64;
        Ok(StepMetrics {
            step: self.core.progress.step,
            loss,
            grad_norm,
            lr: rates.lr,
            tokens: num_items as u64,
            tokens_per_second: num_items / agreed.seconds,
            tflops: work.flops / agreed.seconds / num_ranks / 1e12,
            memory_bytes: agreed.memory as u64,
            consumed_tokens: self.core.progress.consumed_tokens,
            group_lrs: rates.of_groups(),
            loss_scale,
            skipped: !is_update,
            num_zeros: num_zeros.map(|zeros| zeros as u64),
            params_norm,
            task: sums.means(num_items)?,
            ..StepMetrics::default()
        })
    }

    /// Runs forward and backward over this rank's micro-batches. The gradients are those of the sum
    /// of the losses times the returned factor.
    fn forward_backward(&mut self, reduces: bool) -> Result<(Totals, f64), TrainError> {
        self.core.grads.reset();
        let batch = self.core.next_batch();
        // Scale as if the loss were a mean over samples, whose gradients fit better into the range of
        // f16.
        let samples = batch.global_batch_size() as f64;
        let scale = self.core.loss_scaler.as_ref().map(LossScaler::scale);
        let factor = scale.map(|scale| scale / samples);
        let schedule = self.core.pipeline.training(batch.num_micro_batches())?;
        let spec = self.p2p_spec();
        let mut training = Training {
            core: &mut self.core,
            data: &*self.data.train,
            order: self.order,
            stages: &self.stages,
            shape: self.shape,
            factor,
            reduces,
            totals: Totals::of::<T::Model>(),
        };
        run(&schedule, &spec, &mut training)?;
        Ok((training.totals, factor.unwrap_or(1.0)))
    }

    /// Adds what recomputing finds to the error of a step that is not finite.
    ///
    /// # Collective
    /// All ranks, with the same error.
    pub(super) fn with_origin(&mut self, error: TrainError) -> TrainError {
        let device = self.core.device.clone();
        with_diagnosis(error, &device, || {
            self.forward_backward(false)?;
            let (stages, chunks) = (&self.stages, &self.chunks);
            self.core.non_finite_origin(|path| {
                let chunk = chunks.get(path).copied().unwrap_or_default();
                stages[chunk].blocks.end + usize::from(stages[chunk].is_last)
            })
        })
    }

    /// The messages between the stages of a pipeline.
    pub(super) fn p2p_spec(&self) -> P2pSpec {
        let core = &self.core;
        core.pipeline.p2p_spec_of(self.shape, &core.device)
    }

    /// The mean loss on the validation data.
    ///
    /// # Errors
    /// The task has no validation data, or fails; a failed collective or device.
    /// # Collective
    /// All ranks.
    pub fn evaluate(&self) -> Result<EvalMetrics, TrainError> {
        let eval = self.evaluation(&mut || Ok(false))?;
        let why = "it has no validation data; see TaskData::with_validation";
        Ok(eval.ok_or_else(|| TaskRunError::cannot("evaluate its model", why))?)
    }

    /// Resumes from the newest intact checkpoint in `run.dir`, if there is one.
    ///
    /// # Errors
    /// The checkpoint is of another task, model, optimizer or data; all are damaged.
    /// # Collective
    /// All ranks.
    pub fn resume(&mut self) -> Result<Option<Resumed>, TrainError> {
        self.resume_with(&StoredCheckpoints::none())
    }

    /// Writes a checkpoint of the current state into `run.dir`.
    ///
    /// # Errors
    /// Weights are not finite; any rank fails.
    /// # Collective
    /// All ranks.
    pub fn save(&self) -> Result<(), TrainError> {
        self.core.save(self.record())
    }

    /// This rank's part of the model; see [`Trainer::model`](crate::Trainer::model).
    pub fn model(&self) -> &T::Model {
        self.core.model()
    }

    /// This rank's part of the model with all its values, for reading.
    ///
    /// # Errors
    /// A failed collective.
    /// # Collective
    /// With `parallel.zero = 3`, all data-parallel ranks.
    pub fn full_model(&self) -> Result<T::Model, TrainError> {
        self.core.full_model()
    }

    /// Which part of each parameter this rank holds.
    pub fn plan(&self) -> &ShardPlan {
        &self.core.plan
    }

    /// Number of parameters of the full model.
    ///
    /// # Errors
    /// A failed collective.
    /// # Collective
    /// All ranks.
    pub(super) fn num_params(&self) -> Result<usize, TrainError> {
        let own = self.core.plan.iter();
        let own: Vec<(String, usize)> = own
            .map(|(path, spec)| (path.to_string(), spec.shard.global_shape.iter().product()))
            .collect();
        let all = objects::gather(&self.core.groups.world, &own)?;
        let all: BTreeMap<String, usize> = all.into_iter().flatten().collect();
        Ok(all.values().sum())
    }

    /// The progress of the run.
    pub fn progress(&self) -> Progress {
        self.core.progress()
    }
}

/// The state of a rank that trains `model`. `chunks` has the chunk of each parameter.
fn state<M: TrainModel>(
    train: &TrainConfig,
    pipeline: Pipeline,
    model: M,
    chunks: &BTreeMap<String, usize>,
    split: &PipelineSplit,
    groups: &ProcessGroups,
) -> Result<TrainState<M>, TrainError> {
    let dtype = train.train.dtype;
    // The first stage owns what it shares with the last one.
    let is_first = pipeline.chunks().iter().any(|chunk| chunk.embedding);
    let is_end = is_first || pipeline.chunks().iter().any(|chunk| chunk.loss);
    let mut shape = TrainStateShape::new(
        (pipeline, model),
        (&train.parallel, &train.optimizer, dtype),
        |path| chunks.get(path).copied().unwrap_or_default(),
        groups,
    )?;
    for path in split.tied.iter().filter(|_| is_end) {
        if !shape.plan.mark_copy(path, usize::from(!is_first)) {
            let why = format!("it has no parameter `{path}`, which PipelineSplit::with_tied names");
            return Err(TaskRunError::cannot(BUILD, why).into());
        }
    }
    shape.init(&train.parallel, &train.optimizer, |optimizer, model, _| {
        Ok(optimizer.cast_params(model, dtype.into()))
    })
}
