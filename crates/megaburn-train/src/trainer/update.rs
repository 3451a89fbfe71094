//! The update that ends a step.

use megaburn_optim::GradNorm;
use megaburn_report::profile::range;

use crate::{
    config::OptimizerConfig,
    error::TrainError,
    trainer::{Trainer, precision_phases::weight_of, schedules::StepRates},
};

impl Trainer {
    /// Clips the gradients and updates the weights. Quantised layers get the largest magnitudes of the
    /// weights that the update found.
    pub(super) fn clip_and_update(
        &mut self,
        rates: &StepRates,
        norm: &GradNorm,
    ) -> Result<(), TrainError> {
        let _update = range("update");
        let OptimizerConfig {
            clip_grad,
            grad_norm_skip_threshold,
            ..
        } = self.config.optimizer;
        self.grads.clip(norm, limit(clip_grad));
        if grad_norm_skip_threshold > 0.0 {
            self.grads.skip_above(norm, grad_norm_skip_threshold);
        }
        let layers = self.own_layers();
        let wanted = self.weights_with_amaxes(&layers);
        self.optimizer.find_amaxes_of(wanted);
        self.choose_fp8_params();
        let model = self.take_model();
        self.model = Some(
            self.optimizer
                .step_with(|path| rates.of(path), model, &self.grads)?,
        );
        let mut amaxes = self.optimizer.take_amaxes();
        for (path, layer) in layers {
            layer.set_weight_amax(amaxes.remove(&weight_of(&path)));
        }
        Ok(())
    }
}

/// The limit that a setting stands for: 0 means none.
pub(super) fn limit(setting: f64) -> f64 {
    if setting > 0.0 {
        setting
    } else {
        f64::INFINITY
    }
}
