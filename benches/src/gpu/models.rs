//! Training steps of complete small models on one GPU, compared with PyTorch's.

use std::{ffi::OsString, fs, path::PathBuf, process::ExitCode};

use clap::Parser;
use megaburn::{
    cuda,
    train::{ConfigLayers, TrainConfig},
};

use super::{
    peer_times,
    train_step::{Timing, steps},
};
use crate::{
    Failure,
    report::{Args, Report, Table},
};

/// A model and a batch. `benches/peer/models.py` defines the same cases under the same names.
struct Case {
    name: &'static str,
    config: &'static str,
    micro_batch: usize,
    micro_batches: usize,
}

const GPT2: &str = r#"
[model]
family = "gpt2"
vocab = 50257
hidden = 768
ffn = 3072
layers = 12
heads = 12
kv_heads = 12
[data]
seq_len = 1024
"#;

/// GPT-2's width and depth with Llama's blocks, without biases, learned positions and layer norms;
/// the difference shows what they cost.
const LLAMA: &str = r#"
[model]
family = "llama"
vocab = 50257
hidden = 768
ffn = 2048
layers = 12
heads = 12
kv_heads = 12
[data]
seq_len = 1024
"#;

const QWEN2: &str = r#"
[model]
family = "qwen2"
vocab = 151936
hidden = 896
ffn = 4864
layers = 24
heads = 14
kv_heads = 2
rope_theta = 1e6
[data]
seq_len = 2048
"#;

const CASES: [Case; 6] = [
    Case {
        name: "gpt2 16x1",
        config: GPT2,
        micro_batch: 16,
        micro_batches: 1,
    },
    Case {
        name: "gpt2 1x16",
        config: GPT2,
        micro_batch: 1,
        micro_batches: 16,
    },
    Case {
        name: "llama 16x1",
        config: LLAMA,
        micro_batch: 16,
        micro_batches: 1,
    },
    Case {
        name: "llama 1x16",
        config: LLAMA,
        micro_batch: 1,
        micro_batches: 16,
    },
    Case {
        name: "qwen2 4x1",
        config: QWEN2,
        micro_batch: 4,
        micro_batches: 1,
    },
    Case {
        name: "qwen2 1x4",
        config: QWEN2,
        micro_batch: 1,
        micro_batches: 4,
    },
];

const ABOUT: &str = "One optimizer step (forward, backward, clipping, AdamW with f32 masters, gradients and \
    moments) of whole small models in bf16 on one GPU. gpt2: GPT-2 124M (hidden 768, 12 layers, 12 heads, biases, \
    vocabulary 50257), sequences of 1024 tokens. llama: the same width and depth with Llama's blocks (ffn 2048). \
    qwen2: Qwen2-0.5B's shape (hidden 896, 24 layers, 14 heads and 2 of keys and values, ffn 4864, vocabulary \
    151936), sequences of 2048 tokens. AxB: A sequences in each of B micro-batches. PyTorch keeps f32 parameters and \
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
    let load = |case: &Case| -> Result<TrainConfig, Failure> {
        let Case {
            micro_batch,
            micro_batches,
            ..
        } = case;
        let batch = format!(
            "[train]\nmicro_batch = {micro_batch}\nglobal_batch = {}\ndtype = \"bf16\"\n\
             [optimizer]\nwarmup_steps = 0\n",
            micro_batch * micro_batches
        );
        let layers = ConfigLayers::new().with_text("model", case.config)?;
        let mut config = layers.with_text("batch", &batch)?;
        for set in &args.set {
            config = config.with_set(set)?;
        }
        Ok(config
            .with_data(&file.to_string_lossy())?
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
        let names = CASES.map(|case| case.name).join(", ");
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
        let tokens = (config.train.global_batch * config.data.seq_len) as f64;
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
