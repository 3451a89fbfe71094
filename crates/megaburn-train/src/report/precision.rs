//! What rank 0 says about the precision of products while a run trains.

use megaburn_models::DecoderConfig;
use megaburn_report::metrics::StepMetrics;

use super::Reporter;
use crate::{config::TrainConfig, precision_line};

impl Reporter<'_> {
    /// Says that a phase of `precision.schedule` begins with a step.
    pub(crate) fn precision_change(
        &mut self,
        config: &TrainConfig,
        model: &DecoderConfig,
        step: u64,
    ) {
        if let Some(line) = precision_line::describe_change(config, model, step) {
            self.console.line(format!("products {line}"));
        }
    }

    /// Says which layers fall back after a step, and what quantisation lost if it was measured.
    pub(crate) fn precision(&mut self, config: &TrainConfig, metrics: &StepMetrics) {
        let Some(found) = &metrics.precision else {
            return;
        };
        for line in precision_line::describe_step(config, metrics.step, found) {
            self.console.line(format!("products {line}"));
        }
    }
}
