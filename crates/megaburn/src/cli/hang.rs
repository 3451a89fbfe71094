//! `megaburn hang`: which rank did what else when a run hung.

use std::path::PathBuf;

use clap::Args;
use megaburn_train::{
    TrainError,
    hang::{HangAnalysis, read_hang},
};
use serde_json::json;

use super::print;

#[derive(Args)]
pub(super) struct HangArgs {
    /// The folder of a run, or `hangs.jsonl` in it; several files if hosts have folders of their own.
    #[arg(value_name = "RUN", required = true)]
    paths: Vec<PathBuf>,
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
}

impl HangArgs {
    /// Prints where the ranks of the last hang differ.
    ///
    /// # Errors
    /// There is no report of a hang.
    pub(super) fn run(self) -> Result<(), TrainError> {
        let analysis = HangAnalysis::of(read_hang(&self.paths)?);
        match self.json {
            true => print::result(json!(analysis)),
            false => print::result(analysis.to_string().trim_end()),
        }
    }
}
