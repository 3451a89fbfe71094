//! `megaburn profile`: the table of a profile, from its trace.

use std::path::PathBuf;

use clap::Args;
use megaburn_report::profile::{Summary, read_chrome, table};
use megaburn_train::TrainError;
use serde_json::json;

use super::print;

#[derive(Args)]
pub(super) struct ProfileArgs {
    /// A trace: `profile/steps-FIRST-LAST.trace.json` in the folder of a run.
    #[arg(value_name = "TRACE")]
    path: PathBuf,
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
}

impl ProfileArgs {
    /// Prints the table.
    ///
    /// # Errors
    /// The file is not a trace that `train --profile` wrote.
    pub(super) fn run(self) -> Result<(), TrainError> {
        let summary = Summary::of(&read_chrome(&self.path)?);
        match self.json {
            true => print::result(json!(summary)),
            false => print::result(table(&summary).trim_end()),
        }
    }
}
