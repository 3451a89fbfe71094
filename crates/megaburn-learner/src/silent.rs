//! A renderer and a logger for ranks other than 0, which show and write nothing.

use std::error::Error;

use burn_train::{
    LearnerSummary,
    logger::{EvaluationProgressLogger, MetricLogger, TrainingProgressLogger},
    metric::{
        MetricDefinition, NumericEntry,
        store::{EpochSummary, MetricsUpdate, Split},
    },
    renderer::{
        EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation,
        MetricsRendererTraining,
    },
};

/// A renderer that shows nothing.
pub(crate) struct NoRenderer;

impl MetricsRendererTraining for NoRenderer {
    fn update_train(&mut self, _: MetricState) {}
    fn update_valid(&mut self, _: MetricState) {}
    fn on_train_end(&mut self, _: Option<LearnerSummary>) -> Result<(), Box<dyn Error>> {
        Ok(())
    }
}

impl MetricsRendererEvaluation for NoRenderer {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}
    fn on_test_end(&mut self, _: Option<LearnerSummary>) -> Result<(), Box<dyn Error>> {
        Ok(())
    }
}

impl TrainingProgressLogger for NoRenderer {
    fn start(&mut self, _: usize, _: usize, _: Option<usize>, _: Option<&str>) {}
    fn update_epoch(&mut self, _: usize) {}
    fn start_split(&mut self, _: &str, _: usize) {}
    fn update_split(&mut self, _: usize) {}
    fn end_split(&mut self) {}
    fn end(&mut self) {}
    fn log_event_training(&mut self, _: String) {}
}

impl EvaluationProgressLogger for NoRenderer {
    fn start_global_progress(&mut self, _: usize) {}
    fn start_test(&mut self, _: &str, _: usize) {}
    fn update_test_progress(&mut self, _: usize) {}
    fn end_test(&mut self) {}
    fn end_global_progress(&mut self) {}
    fn log_event_evaluation(&mut self, _: String) {}
}

impl MetricsRenderer for NoRenderer {
    fn manual_close(&mut self) {}
    fn register_metric(&mut self, _: MetricDefinition) {}
}

/// A logger that writes nothing.
pub(crate) struct NoLogger;

impl MetricLogger for NoLogger {
    fn log(&mut self, _: MetricsUpdate, _: usize, _: &Split) {}
    fn read_numeric(&mut self, _: &str, _: usize, _: &Split) -> Result<Vec<NumericEntry>, String> {
        Ok(Vec::new())
    }
    fn log_metric_definition(&mut self, _: MetricDefinition) {}
    fn log_epoch_summary(&mut self, _: EpochSummary) {}
}
