//! Pre-trains a Llama. Without arguments, it trains a byte-level model of under a million
//! parameters on the Rust sources of the Burn crates. It runs on four rank threads (tensor,
//! sequence and data parallel) or, if built with `--features cuda`, on all GPUs of the host with
//! one process each.
//!
//! ```sh
//! cargo run --release --example llama_pretrain
//! cargo run --release --features cuda --example llama_pretrain
//! cargo run --release --example llama_pretrain -- --help
//! ```

use std::process::ExitCode;

fn main() -> ExitCode {
    megaburn_examples::llama_pretrain(std::env::args_os())
}
