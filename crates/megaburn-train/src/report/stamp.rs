//! What the reporter adds to each record: its time, its start, its utilization of the GPU.

use std::time::SystemTime;

use megaburn_collective::RankEnv;
use megaburn_report::metrics::{EvalMetrics, StepMetrics};

use crate::{config::TrainConfig, device::Devices, mfu::peak_tflops};

/// What the reporter adds to each record.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stamp {
    start_number: u64,
    /// The peak of a rank's GPU in 10^12 FLOP/s, if it is known.
    peak_tflops: Option<f64>,
    consumed_tokens: Option<u64>,
}

impl Stamp {
    /// `consumed_tokens` are those before this start.
    pub(super) fn new(
        config: &TrainConfig,
        devices: Devices,
        env: Option<&RankEnv>,
        start_number: u64,
        consumed_tokens: Option<u64>,
    ) -> Self {
        Self {
            start_number,
            peak_tflops: peak_tflops(config, devices, env),
            consumed_tokens,
        }
    }

    /// A step that has just ended.
    pub(super) fn step(&mut self, metrics: &StepMetrics) -> StepMetrics {
        self.consumed_tokens = metrics.consumed_tokens;
        StepMetrics {
            mfu: self.peak_tflops.map(|peak| metrics.tflops / peak),
            wall_time: Some(now()),
            start_number: Some(self.start_number),
            ..metrics.clone()
        }
    }

    /// An evaluation that has just ended.
    pub(super) fn eval(&self, metrics: &EvalMetrics) -> EvalMetrics {
        EvalMetrics {
            consumed_tokens: self.consumed_tokens,
            wall_time: Some(now()),
            start_number: Some(self.start_number),
            ..metrics.clone()
        }
    }
}

/// The time in seconds since 1970, to the millisecond.
fn now() -> f64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_millis() as f64 / 1000.0)
}
