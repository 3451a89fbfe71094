//! `megaburn train` by itself, for tests to start.

use std::process::ExitCode;

use clap::Parser;
use megaburn::cli::TrainArgs;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    train: TrainArgs,
}

fn main() -> ExitCode {
    Cli::parse().train.run()
}
