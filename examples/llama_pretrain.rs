//! Pre-trains a Llama. Without arguments: a byte-level model of under a million parameters on four
//! rank threads (tensor, sequence and data parallel), on the Rust sources of the Burn crates.
//!
//! ```sh
//! cargo run --release --example llama_pretrain
//! cargo run --release --example llama_pretrain -- --help
//! ```

use std::process::ExitCode;

use clap::Parser;
use megaburn::cli::TrainArgs;

/// Pre-trains a Llama with tensor, sequence and data parallelism.
#[derive(Parser)]
#[command(name = "llama_pretrain")]
struct Cli {
    #[command(flatten)]
    train: TrainArgs,
}

fn main() -> ExitCode {
    Cli::parse().train.run()
}
