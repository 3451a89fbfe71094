//! `megaburn checkpoint average`.

use std::path::PathBuf;

use clap::Args;
use megaburn_models::weights::average_weights;
use megaburn_train::TrainError;
use serde_json::json;

use super::super::{interrupt::end_clean_on_signals, print};

#[derive(Args)]
pub(in crate::cli) struct AverageArgs {
    /// The checkpoint to write.
    #[arg(value_name = "OUT")]
    to: PathBuf,
    /// Checkpoints of one model, or runs, whose newest intact checkpoints are used.
    #[arg(value_name = "CHECKPOINT", required = true)]
    from: Vec<PathBuf>,
    /// A weight for each checkpoint, in their order. Default: equal weights.
    #[arg(
        long,
        value_name = "W,W",
        value_delimiter = ',',
        allow_negative_numbers = true
    )]
    weights: Option<Vec<f64>>,
    /// Replace an existing checkpoint.
    #[arg(long)]
    force: bool,
    /// Print the result as a JSON object.
    #[arg(long)]
    json: bool,
}

impl AverageArgs {
    pub(super) fn run(self) -> Result<(), TrainError> {
        end_clean_on_signals()?;
        let count = self.from.len();
        let weights = self.weights.unwrap_or_else(|| vec![1.0; count]);
        if weights.len() != count {
            return Err(TrainError::Invalid {
                key: "--weights",
                value: format!("{weights:?}"),
                rule: format!("a number for each of the {count} checkpoints"),
            });
        }
        let config = average_weights(&self.from, &weights, &self.to, self.force)?;
        let to = self.to.display().to_string();
        if self.json {
            let from: Vec<_> = self
                .from
                .iter()
                .map(|path| path.display().to_string())
                .collect();
            return print::result(json!({"path": to, "from": from, "weights": weights}));
        }
        let family = config.family;
        print::note(format!("{family}, the mean of {count} checkpoints -> {to}"));
        print::note(format!("to train it further, --init {to}"));
        Ok(())
    }
}
