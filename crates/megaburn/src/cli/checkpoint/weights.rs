//! `megaburn checkpoint weights`.

use std::path::PathBuf;

use burn::tensor::DType;
use clap::Args;
use megaburn_models::weights::extract_weights;
use megaburn_train::TrainError;
use serde_json::json;

use super::super::{convert::DtypeArg, interrupt::end_clean_on_signals, print};

#[derive(Args)]
pub(in crate::cli) struct WeightsArgs {
    /// A checkpoint, or a run, whose newest intact checkpoint is used.
    #[arg(value_name = "CHECKPOINT")]
    from: PathBuf,
    /// The checkpoint to write.
    #[arg(value_name = "OUT")]
    to: PathBuf,
    /// Element type of the weights. Default: unchanged.
    #[arg(long, value_enum, value_name = "D")]
    dtype: Option<DtypeArg>,
    /// Replace an existing checkpoint.
    #[arg(long)]
    force: bool,
    /// Print the result as a JSON object.
    #[arg(long)]
    json: bool,
}

impl WeightsArgs {
    pub(super) fn run(self) -> Result<(), TrainError> {
        end_clean_on_signals()?;
        let dtype = self.dtype.map(DType::from);
        let source = extract_weights(&self.from, &self.to, dtype, self.force)?;
        let [from, to] = [&self.from, &self.to].map(|path| path.display().to_string());
        let params = source.num_params();
        if self.json {
            return print::result(json!({"from": from, "path": to, "parameters": params}));
        }
        let family = source.config().family;
        print::note(format!("{family}, {params} parameters: {from} -> {to}"));
        print::note(format!("to train it further, --init {to}"));
        Ok(())
    }
}
