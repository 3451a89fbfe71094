//! Training steps of complete models on one GPU, compared with PyTorch's.

mod cases;
mod sentences;

use std::{ffi::OsString, fs, path::PathBuf, process::ExitCode};

use clap::Parser;
use megaburn::{
    cuda,
    train::{ConfigLayers, TrainConfig, config::DatasetKind},
};

use super::{
    peer_times,
    train_step::{Timing, steps},
};
use crate::{
    Failure,
    report::{Args, Report, Table},
};
use cases::{CASES, Case, Data};
use sentences::Sentences;

const ABOUT: &str = "One optimizer step (forward, backward, clipping, AdamW with f32 masters, gradients and \
    moments) of whole models in bf16 on one GPU. gpt2: GPT-2 124M (hidden 768, 12 layers, 12 heads, biases, \
    vocabulary 50257), sequences of 1024 tokens. llama: the same width and depth with Llama's blocks (ffn 2048). \
    qwen2: Qwen2-0.5B's shape (hidden 896, 24 layers, 14 heads and 2 of keys and values, ffn 4864, vocabulary \
    151936), sequences of 2048 tokens. gpt-7b: 8 of the 32 layers of the GPT of Megatron-LM's CI (hidden 4096, 32 heads \
    and 8 of keys and values, ffn 16384, biases, untied, vocabulary 131073), sequences of 8192 tokens. bert-large: \
    hidden 1024, 24 layers, 16 heads, ffn 4096, vocabulary 30522, rows of 512 positions, of which a tenth are cut to \
    a random length, and PyTorch gets a mask of the padding; bert-full: the same without padding and mask. t5-large: T5 1.1 \
    large (hidden 1024, 24 layers each of encoder and decoder, 16 heads, gated ffn 2816, untied, vocabulary 32128), \
    rows of 512 and 128 positions with padding, which count as tokens. AxB: A \
    sequences in each of B micro-batches. PyTorch keeps f32 parameters and \
    computes in bf16 by autocast. The time is the median from the end of a step to the end of the next, its loss \
    read; the ratio is PyTorch's time by ours.";

#[derive(Debug, Parser)]
struct ModelsArgs {
    #[command(flatten)]
    report: Args,
    /// The output of `peer/models.py` in the same run.
    #[arg(long, value_name = "FILE")]
    peer: Option<PathBuf>,
    /// Measure only the models whose names start with this text, e.g. `gpt2` or `"gpt2 1x16"`.
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Settings on top of the measurement's own, as in `megaburn train --set`.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Run one more step of each model at the end with the profiler on, for
    /// `nsys profile -c cudaProfilerApi` or `ncu --profile-from-start off`.
    #[arg(long)]
    profile: bool,
    /// Number of timed steps.
    #[arg(long, default_value_t = 20)]
    steps: usize,
}

/// Runs the measurement.
pub fn main(command: Vec<OsString>) -> ExitCode {
    match run(&ModelsArgs::parse_from(command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &ModelsArgs) -> Result<(), Failure> {
    cuda::start()?;
    let mut report = Report::new("models", ABOUT);
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("text.txt");
    fs::write(
        &file,
        "The quick brown fox jumps over the lazy dog. ".repeat(20_000),
    )?;
    let sentences = Sentences::new(folder.path());
    let load = |case: &Case| -> Result<TrainConfig, Failure> {
        let Case {
            micro_batch,
            micro_batches,
            data,
            ..
        } = case;
        let batch = format!(
            "[train]\nmicro_batch = {micro_batch}\nglobal_batch = {}\ndtype = \"bf16\"\n\
             [optimizer]\nwarmup_steps = 0\n",
            micro_batch * micro_batches
        );
        let layers = ConfigLayers::new().with_text("model", case.config)?;
        let mut config = layers.with_text("batch", &batch)?;
        let path = match data {
            Data::Text => file.clone(),
            Data::Sentences => {
                for set in sentences.settings()? {
                    config = config.with_set(&set)?;
                }
                sentences.prefix()
            }
        };
        for set in &args.set {
            config = config.with_set(set)?;
        }
        Ok(config
            .with_data(&path.to_string_lossy())?
            .with_layout("tp1")?
            .load()?)
    };
    let is_wanted = |case: &&Case| {
        args.only
            .as_ref()
            .is_none_or(|name| case.name.starts_with(name))
    };
    let cases: Vec<_> = CASES.iter().filter(is_wanted).collect();
    if cases.is_empty() {
        let names: Vec<_> = CASES.iter().map(|case| case.name).collect();
        let names = names.join(", ");
        return Err(format!("--only {:?}: there are {names}", args.only.as_deref()).into());
    }
    let peers = peer_times(args.peer.as_deref())?;
    let head = [
        "model",
        "ms",
        "enqueued ms",
        "tokens/s",
        "GiB",
        "eager",
        "ratio",
        "compile",
        "ratio",
    ];
    let mut table = Table::new("a training step", &head);
    for case in cases {
        let config = load(case)?;
        let decoder_len = match config.data.dataset {
            DatasetKind::T5 => config.data.decoder_seq_len,
            DatasetKind::Gpt | DatasetKind::Bert => 0,
        };
        let tokens = (config.train.global_batch * (config.data.seq_len + decoder_len)) as f64;
        println!("{}:", case.name);
        let timing = Timing {
            steps: args.steps,
            profile: args.profile,
        };
        let found = steps(timing, config)?;
        let peer = |mode: &str| match peers.get(&format!("{} {mode}", case.name)) {
            Some(ms) => [
                format!("{ms:.1}"),
                format!("{:.2}", ms / (found.seconds * 1e3)),
            ],
            None => [String::new(), String::new()],
        };
        let [eager, by_eager] = peer("eager");
        let [compiled, by_compiled] = peer("compile");
        table.row(vec![
            case.name.to_string(),
            format!("{:.1}", found.seconds * 1e3),
            format!("{:.1}", found.host * 1e3),
            format!("{:.0}", tokens / found.seconds),
            format!("{:.1}", found.memory as f64 / f64::from(1 << 30)),
            eager,
            by_eager,
            compiled,
            by_compiled,
        ]);
    }
    report.table(&table);
    report.finish(&args.report)
}
