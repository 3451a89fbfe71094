//! The model of a trainer, for those that read or replace it.

use burn::module::Module;

use super::TrainerCore;
use crate::error::TrainError;

impl<M: Module> TrainerCore<M> {
    /// This rank's part of the model, whose parameters are no longer in flight.
    pub(crate) fn model(&self) -> &M {
        self.sharding.settle();
        self.model_in_flight()
    }

    /// This rank's part of the model with all its values, for reading.
    ///
    /// # Errors
    /// A failed collective.
    /// # Collective
    /// With `parallel.zero = 3`, all data-parallel ranks.
    pub(crate) fn full_model(&self) -> Result<M, TrainError> {
        Ok(self.sharding.whole(self.model_in_flight().clone())?)
    }

    /// As [`model`](Self::model), but parameters may still be in flight: for computing with it
    /// layer by layer.
    pub(crate) fn model_in_flight(&self) -> &M {
        self.model
            .as_ref()
            .expect("the model is absent only during an update")
    }

    /// Takes the model to replace it. On a GPU what follows waits for the copies of an asynchronous
    /// save; the host does not.
    pub(crate) fn take_model(&mut self) -> M {
        self.copies_in_flight.clear();
        self.unchanged.forget();
        self.model
            .take()
            .expect("the model is absent only during an update")
    }
}
