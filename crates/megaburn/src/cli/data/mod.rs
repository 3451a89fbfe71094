//! `megaburn data`: makes and inspects data sets in Megatron-LM's format.

mod combine;
mod inspect;
mod preprocess;
mod progress;
mod stats;

use clap::Subcommand;
use megaburn_data::DataError;
use megaburn_train::TrainError;

#[derive(Subcommand)]
pub(super) enum DataCommand {
    /// Encode text files into a data set in Megatron-LM's format.
    Preprocess(preprocess::PreprocessArgs),
    /// Check a data set, and show what is in it.
    Inspect(inspect::InspectArgs),
    /// Show how long the documents of a data set are.
    Stats(stats::StatsArgs),
    /// Join the documents of several data sets, one after another.
    Merge(combine::MergeArgs),
    /// Divide the documents of a data set into data sets for training, validation and test.
    Split(combine::SplitArgs),
}

impl DataCommand {
    pub(super) fn run(self) -> Result<(), TrainError> {
        match self {
            Self::Preprocess(args) => args.run(),
            Self::Inspect(args) => args.run(),
            Self::Stats(args) => args.run(),
            Self::Merge(args) => args.run(),
            Self::Split(args) => args.run(),
        }
    }
}

/// The error of a command. A file that cannot be written is a failure, no bad input.
fn failed(error: DataError) -> TrainError {
    match error {
        DataError::Write { path, source } => TrainError::Write { path, source },
        error => error.into(),
    }
}

/// A number with its noun, in the plural if it is not 1.
fn counted(count: u64, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}
