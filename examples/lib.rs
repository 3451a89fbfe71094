//! The main job as a function: for `llama_pretrain` beside this file, and for a program that is
//! several.

use std::{ffi::OsString, process::ExitCode};

use clap::Parser;
use megaburn::cli::{TrainArgs, with_setting};

/// Pre-trains a Llama with tensor, sequence and data parallelism.
#[derive(Parser)]
#[command(name = "llama_pretrain")]
struct Cli {
    #[command(flatten)]
    train: TrainArgs,
}

/// Runs the command line of `llama_pretrain`, which begins with the program's name.
pub fn llama_pretrain(command: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = Cli::try_parse_from(command).map_err(with_setting);
    cli.unwrap_or_else(|error| error.exit()).train.run()
}
