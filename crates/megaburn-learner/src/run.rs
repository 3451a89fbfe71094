//! The epochs of a training.

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn_train::{
    EventProcessorTraining, InferenceStep, LearnerEvent, LearnerModel,
    SupervisedTrainingEventProcessor, TrainLoader, TrainStep, TrainingComponents, ValidLoader,
};
use megaburn_collective::{ProcessGroups, objects};

use crate::{
    checkpoint::Checkpoints,
    error::LearnerError,
    gradients::Gradients,
    output::RankOutput,
    parts::Parts,
    shares::shared,
    start::{Buffers, synchronized},
};

/// A training while it runs.
pub(crate) struct Training<M: LearnerModel> {
    pub(crate) parts: Parts<M>,
    pub(crate) groups: ProcessGroups,
    pub(crate) components: TrainingComponents<M>,
    /// Number of batches that this rank has computed, for messages.
    pub(crate) step: usize,
    /// The learning rate of the last update.
    pub(crate) lr: ModuleLearningRate,
    /// Whether a rank asked to stop before the last step.
    pub(crate) is_stopping: bool,
}

impl<M> Training<M>
where
    M: LearnerModel,
    <M as TrainStep>::Output: RankOutput,
    <M as InferenceStep>::Output: RankOutput,
{
    pub(crate) fn new(
        parts: Parts<M>,
        groups: ProcessGroups,
        components: TrainingComponents<M>,
    ) -> Self {
        Self {
            parts,
            groups,
            components,
            step: 0,
            lr: 0.0.into(),
            is_stopping: false,
        }
    }

    /// Runs all epochs from `first` on.
    ///
    /// # Collective
    /// All ranks. An error of one rank ends the others' waits with an error.
    pub(crate) fn run(
        &mut self,
        (train, valid): (TrainLoader<M>, ValidLoader<M>),
        first: usize,
        max_grad_norm: Option<f64>,
        checkpoints: Option<Checkpoints>,
    ) -> Result<(), LearnerError> {
        if self.components.checkpointer.is_some() {
            return Err(LearnerError::BurnCheckpointers);
        }
        let groups = self.groups.clone();
        let device = self.parts.model().devices().swap_remove(0);
        let device = if device.is_autodiff() {
            device
        } else {
            device.autodiff()
        };
        let (num_train, num_valid) = (train.num_items(), valid.num_items());
        let train = shared(train, "training", &groups, &device)?;
        let valid = shared(valid, "validation", &groups, &device.clone().inner())?;
        let mut buffers = Buffers::default();
        self.parts.map_model(|model, plan| {
            let model = model.fork(&device);
            synchronized(model, plan, &groups, &mut buffers)
        })?;
        let resumes_from = self.components.checkpoint;
        let mut checkpoints = match (checkpoints, resumes_from) {
            (Some(checkpoints), epoch) => {
                Some(checkpoints.opened(&mut self.parts, &groups, epoch)?)
            }
            (None, Some(epoch)) => return Err(LearnerError::NoFolder { epoch }),
            (None, None) => None,
        };
        let (model, plan) = (self.parts.model(), &self.parts.plan);
        let mut gradients = Gradients::new(model, plan, &groups, max_grad_norm)?;

        for epoch in first..=self.components.num_epochs {
            self.on_train(LearnerEvent::StartSplit {
                epoch_number: epoch,
                total_items: num_train,
            });
            self.train_epoch(&*train, num_train, &mut gradients)?;
            self.on_train(LearnerEvent::EndSplit(epoch));
            if self.is_stopped()? {
                break;
            }
            self.parts
                .map_model(|model, plan| buffers.synchronized(model, plan, &groups))?;
            self.on_valid(LearnerEvent::StartSplit {
                epoch_number: epoch,
                total_items: num_valid,
            });
            self.valid_epoch(&*valid, num_valid)?;
            self.on_valid(LearnerEvent::EndSplit(epoch));
            self.on_train(LearnerEvent::EndEpoch(epoch));
            let flushed = self.components.event_processor.flush();
            self.components.interrupter.fail_on_error(flushed);
            if self.is_stopped()? {
                break;
            }
            if let Some(checkpoints) = &mut checkpoints {
                checkpoints.save(&self.parts, &groups, &self.components.event_store, epoch)?;
            }
            if self.stops_early(epoch)? {
                break;
            }
        }
        Ok(())
    }

    /// The model, and what shows its metrics.
    pub(crate) fn finish(self) -> (M, SupervisedTrainingEventProcessor<M>) {
        let model = self.parts.model.expect("an update puts it back");
        (model, self.components.event_processor)
    }

    /// Processes an event of training on rank 0. An error stops the training.
    pub(crate) fn on_train(&mut self, event: LearnerEvent<<M as TrainStep>::Output>) {
        if self.groups.is_main() {
            let result = self.components.event_processor.process_train(event);
            self.components.interrupter.fail_on_error(result);
        }
    }

    /// Processes an event of validation on rank 0. An error stops the training.
    pub(crate) fn on_valid(&mut self, event: LearnerEvent<<M as InferenceStep>::Output>) {
        if self.groups.is_main() {
            let result = self.components.event_processor.process_valid(event);
            self.components.interrupter.fail_on_error(result);
        }
    }

    /// Whether any rank was asked to stop, or failed.
    ///
    /// # Collective
    /// All ranks; one number.
    fn is_stopped(&mut self) -> Result<bool, LearnerError> {
        let interrupter = &self.components.interrupter;
        let why = interrupter.should_stop().then(|| {
            let error = interrupter.error().map(|error| error.to_string());
            let why = error.or_else(|| interrupter.get_message());
            why.unwrap_or_else(|| "no reason was given".to_owned())
        });
        let all = objects::gather(&self.groups.world, &why)?;
        let stopped = all.into_iter().enumerate();
        let first = stopped.filter_map(|(rank, why)| Some((rank, why?))).next();
        let first = objects::broadcast(&self.groups.world, &first)?;
        let Some((rank, why)) = &first else {
            return Ok(false);
        };
        if !interrupter.should_stop() {
            interrupter.stop(Some(&format!("rank {rank} stopped: {why}")));
        }
        Ok(true)
    }

    /// Whether rank 0's early stopping ends the training.
    ///
    /// # Collective
    /// All ranks, if there is early stopping; one value.
    fn stops_early(&mut self, epoch: usize) -> Result<bool, LearnerError> {
        let components = &mut self.components;
        let Some(early_stopping) = &mut components.early_stopping else {
            return Ok(false);
        };
        let is_main = self.groups.is_main();
        let stops = is_main && early_stopping.should_stop(epoch, &components.event_store);
        Ok(objects::broadcast(&self.groups.world, &stops)?)
    }
}
