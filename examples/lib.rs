//! The main job as a function, for `llama_pretrain` in this folder and for binaries that contain
//! several programs.

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

/// Runs `llama_pretrain` with the given command line, program name first.
pub fn llama_pretrain(command: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = Cli::try_parse_from(command).map_err(with_setting);
    cli.unwrap_or_else(|error| error.exit()).train.run()
}
