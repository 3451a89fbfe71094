//! The model, the optimizer and the plan of a trainer, for those that read or replace them.

use burn::prelude::Device;
use megaburn_mesh::ShardPlan;
use megaburn_models::Decoder;
use megaburn_optim::Optimizer;

use super::Trainer;
use crate::error::TrainError;

impl Trainer {
    /// This rank's part of the model with all its values, for reading.
    ///
    /// # Errors
    /// A failed collective.
    /// # Collective
    /// With `parallel.zero = 3`, all data-parallel ranks, which need memory for the gathered
    /// parameters.
    pub fn full_model(&self) -> Result<Decoder, TrainError> {
        Ok(self.sharding.whole(self.model_in_flight().clone())?)
    }

    /// As [`model`](Self::model), but parameters may still be in flight: for computing with it
    /// layer by layer.
    pub(super) fn model_in_flight(&self) -> &Decoder {
        self.model
            .as_ref()
            .expect("the model is absent only during an update")
    }

    /// Takes the model to replace it. On a GPU what follows waits for the copies of an asynchronous
    /// save; the host does not. Its weights may change: what was found of them is unset.
    pub(super) fn take_model(&mut self) -> Decoder {
        self.copies_in_flight.clear();
        for layer in self.own_layers().values() {
            layer.set_weight_amax(None);
        }
        self.model
            .take()
            .expect("the model is absent only during an update")
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// The optimizer, with the number of its steps.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// Which part of each parameter this rank holds.
    pub fn plan(&self) -> &ShardPlan {
        &self.plan
    }
}
