//! What rank 0 says about the precision of products while a run trains.

use megaburn_models::DecoderConfig;
use megaburn_report::metrics::StepMetrics;

use super::Reporter;
use crate::{config::TrainConfig, precision_line};

impl Reporter<'_> {
    /// Says what changed in the precision of a step, and what quantisation lost if it was measured.
    pub(crate) fn precision(
        &mut self,
        config: &TrainConfig,
        model: &DecoderConfig,
        metrics: &StepMetrics,
    ) {
        let Some(found) = &metrics.precision else {
            return;
        };
        let change = precision_line::describe_change(config, model, metrics.step);
        let lines = precision_line::describe_step(config, metrics.step, found);
        for line in change.into_iter().chain(lines) {
            self.console.line(format!("products {line}"));
        }
    }
}
