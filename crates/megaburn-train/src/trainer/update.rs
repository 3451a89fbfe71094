//! The update that ends a step.

use megaburn_optim::GradNorm;

use crate::{
    error::TrainError,
    trainer::{Trainer, precision_phases::weight_of},
    trainer_core::StepRates,
};

impl Trainer {
    /// Clips the gradients and updates the weights. Quantised layers get the largest magnitudes of the
    /// weights that the update found.
    pub(super) fn clip_and_update(
        &mut self,
        rates: &StepRates,
        norm: &GradNorm,
    ) -> Result<(), TrainError> {
        let _update = self.core.part("update");
        self.core.clip(norm);
        let layers = self.own_layers();
        let wanted = self.weights_with_amaxes(&layers);
        self.core.optimizer.find_amaxes_of(wanted);
        self.choose_fp8_params();
        self.unset_weight_amaxes();
        self.core.update_weights(rates)?;
        let mut amaxes = self.core.optimizer.take_amaxes();
        for (path, layer) in layers {
            layer.set_weight_amax(amaxes.remove(&weight_of(&path)));
        }
        Ok(())
    }
}
