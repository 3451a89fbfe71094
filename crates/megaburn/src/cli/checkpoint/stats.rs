//! `megaburn checkpoint stats`.

use std::path::PathBuf;

use clap::Args;
use megaburn_train::TrainError;

use super::{pattern::TensorPattern, place, tensor_table::print_tensors};

#[derive(Args)]
pub(in crate::cli) struct StatsArgs {
    /// A checkpoint, or a run, whose newest whole checkpoint is taken.
    #[arg(value_name = "CHECKPOINT")]
    path: PathBuf,
    /// Only tensors whose full names match, such as `model.*`. Default: all.
    #[arg(value_name = "PATTERN")]
    pattern: Option<TensorPattern>,
    /// Print only JSON on stdout: one object per line, for each tensor.
    #[arg(long)]
    json: bool,
}

impl StatsArgs {
    pub(super) fn run(self) -> Result<(), TrainError> {
        let checkpoint = place::open(&self.path)?;
        let pattern = self.pattern.unwrap_or_else(TensorPattern::all);
        print_tensors(&checkpoint, &pattern.select(&checkpoint)?, true, self.json)
    }
}
