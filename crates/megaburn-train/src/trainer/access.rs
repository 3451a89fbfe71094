//! The model, the optimizer and the plan of a trainer, for those that read or replace them.

use burn::prelude::Device;
use megaburn_mesh::{Layout, ShardPlan};
use megaburn_models::{Decoder, DecoderConfig};
use megaburn_optim::Optimizer;

use super::Trainer;
use crate::error::TrainError;

impl Trainer {
    /// This rank's part of the model. With `parallel.zero = 3` its sharded matrices hold
    /// placeholders: a rank keeps a shard of them, and all ranks that shard together must compute
    /// with the model, or [save](Self::save) it, together.
    pub fn model(&self) -> &Decoder {
        self.core.model()
    }

    /// This rank's part of the model with all its values, for reading.
    ///
    /// # Errors
    /// A failed collective.
    /// # Collective
    /// With `parallel.zero = 3`, all data-parallel ranks, which need memory for the gathered
    /// parameters.
    pub fn full_model(&self) -> Result<Decoder, TrainError> {
        self.core.full_model()
    }

    /// As [`model`](Self::model), but parameters may still be in flight: for computing with it
    /// layer by layer.
    pub(super) fn model_in_flight(&self) -> &Decoder {
        self.core.model_in_flight()
    }

    /// Takes the model to replace it. Its weights may change: what was found of them is unset.
    pub(super) fn take_model(&mut self) -> Decoder {
        self.unset_weight_amaxes();
        self.core.take_model()
    }

    /// Unsets the largest magnitudes of weights that are about to change.
    pub(super) fn unset_weight_amaxes(&self) {
        for layer in self.own_layers().values() {
            layer.set_weight_amax(None);
        }
    }

    pub(crate) fn device(&self) -> &Device {
        &self.core.device
    }

    pub(crate) fn layout(&self) -> Layout {
        self.core.layout()
    }

    pub(crate) fn model_config(&self) -> &DecoderConfig {
        &self.model_config
    }

    /// The optimizer, with the number of its steps.
    pub fn optimizer(&self) -> &Optimizer {
        &self.core.optimizer
    }

    /// Which part of each parameter this rank holds.
    pub fn plan(&self) -> &ShardPlan {
        &self.core.plan
    }
}
