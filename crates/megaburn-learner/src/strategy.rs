//! The training strategy of one rank, as `burn-train` calls it.

use std::sync::{Arc, Mutex, PoisonError};

use burn_train::{
    InferenceStep, Learner, LearnerModel, SupervisedLearningStrategy,
    SupervisedTrainingEventProcessor, TrainLoader, TrainStep, TrainingComponents, ValidLoader,
};
use megaburn_collective::ProcessGroups;

use crate::{
    checkpoint::Checkpoints, error::LearnerError, output::RankOutput, parts::Parts, run::Training,
};

/// The settings of a training.
pub(crate) struct Options {
    pub(crate) groups: ProcessGroups,
    pub(crate) max_grad_norm: Option<f64>,
    pub(crate) checkpoints: Option<Checkpoints>,
}

/// A place for an error, because a strategy cannot return one.
pub(crate) type Failure = Arc<Mutex<Option<LearnerError>>>;

pub(crate) struct Strategy<M> {
    work: Mutex<Option<(Parts<M>, Options)>>,
    failure: Failure,
}

impl<M> Strategy<M> {
    pub(crate) fn new(parts: Parts<M>, options: Options, failure: Failure) -> Self {
        Self {
            work: Mutex::new(Some((parts, options))),
            failure,
        }
    }
}

impl<M> SupervisedLearningStrategy<M> for Strategy<M>
where
    M: LearnerModel,
    <M as TrainStep>::Output: RankOutput,
    <M as InferenceStep>::Output: RankOutput,
{
    fn fit(
        &self,
        components: TrainingComponents<M>,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        // The learner is a second owner of the weights, which would keep updates from being made in
        // place.
        drop(learner);
        let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        let (parts, options) = work.take().expect("a strategy is used once");
        let mut training = Training::new(parts, options.groups, components);
        let result = training.run(
            (train, valid),
            starting_epoch,
            options.max_grad_norm,
            options.checkpoints,
        );
        if let Err(error) = result {
            let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
            *failure = Some(error);
        }
        training.finish()
    }
}
