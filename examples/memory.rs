//! Prints the GPU memory that each rank of a run needs, by formula; nothing is allocated.
//!
//! ```sh
//! cargo run --release --example memory -- --config configs/llama-3-8b.toml
//! cargo run --release --example memory -- --config configs/llama-3-70b.toml --layout tp8-pp8-sp
//! ```

use std::process::ExitCode;

use clap::Parser;
use megaburn::{
    cli::TrainArgs,
    kernels::AttentionKernel,
    train::{
        Exit, TrainError,
        config::Dtype,
        estimate::{MemoryEstimate, Scores},
    },
};

/// Estimates the memory of a rank.
#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    train: TrainArgs,
}

fn main() -> ExitCode {
    match print(&Cli::parse().train) {
        Ok(()) => Exit::Done.into(),
        Err(error) => {
            eprintln!("error: {error}");
            error.exit().into()
        }
    }
}

fn print(args: &TrainArgs) -> Result<(), TrainError> {
    let config = args.load()?;
    let layout = config.layout(None)?;
    // Fused attention needs bf16 or f16.
    let is_fallback =
        config.train.dtype == Dtype::F32 || config.train.attention == AttentionKernel::Reference;
    let scores = if is_fallback {
        Scores::Kept
    } else {
        Scores::Never
    };
    println!("{layout}: {} ranks", layout.world_size());
    for (stage, estimate) in MemoryEstimate::of_stages(&config, &layout, scores)?
        .iter()
        .enumerate()
    {
        println!("stage {stage}: {estimate}");
    }
    Ok(())
}
