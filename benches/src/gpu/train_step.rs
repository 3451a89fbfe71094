//! A training step of four layers of Llama-3-8B on one GPU, compared with PyTorch's.

use std::{ffi::OsString, fs, path::PathBuf, process::ExitCode, sync::Arc, time::Instant};

use burn::{backend::Cube, prelude::Device, tensor::Tensor};
use clap::Parser;
use megaburn::{
    collective::ProcessGroups,
    cuda,
    train::{ConfigLayers, RunData, TrainConfig, Trainer},
};

use super::peer_times;
use crate::{
    Failure,
    report::{Args, Report, Table},
};

const CONFIG: &str = r#"
[model]
hidden = 4096
ffn = 14336
layers = 4
heads = 32
kv_heads = 8
vocab = 32000
tied = false
[data]
seq_len = 4096
[train]
global_batch = 1
micro_batch = 1
dtype = "bf16"
[optimizer]
warmup_steps = 0
"#;

/// The suffix of a row's name, shared with the peers' rows, and the optimizer settings. The first
/// matches PyTorch's AdamW on a bf16 model, which does not clip; the second Megatron-LM's.
const OPTIMIZERS: [(&str, &[&str]); 2] = [
    (
        "",
        &[
            "optimizer.main_params_dtype=bf16",
            "optimizer.main_grads_dtype=bf16",
            "optimizer.exp_avg_dtype=bf16",
            "optimizer.exp_avg_sq_dtype=bf16",
            "optimizer.clip_grad=0",
        ],
    ),
    (", f32 masters", &[]),
];

#[derive(Debug, Parser)]
struct StepArgs {
    #[command(flatten)]
    report: Args,
    /// The output of `peer/train_step.py` in the same run.
    #[arg(long, value_name = "FILE")]
    peer: Option<PathBuf>,
    /// Settings on top of the measurement's own, as in `megaburn train --set`.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Run one more step of each optimizer at the end with the profiler on, for
    /// `ncu --profile-from-start off`, and write no result.
    #[arg(long)]
    profile: bool,
    /// Number of timed steps.
    #[arg(long, default_value_t = 12)]
    steps: usize,
}

/// Runs the measurement.
pub fn main(command: Vec<OsString>) -> ExitCode {
    match run(&StepArgs::parse_from(command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &StepArgs) -> Result<(), Failure> {
    cuda::start()?;
    let about = "One optimizer step (forward, backward, AdamW) of four layers of Llama-3-8B's shape: \
                 hidden 4096, 32 heads (8 key/value), ffn 14336, vocabulary 32000, one sequence, on \
                 one GPU. The time is the median from the end of a step to the end \
                 of the next, including reading the loss.";
    let mut report = Report::new("train_step", about);
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("text.txt");
    fs::write(
        &file,
        "The quick brown fox jumps over the lazy dog. ".repeat(20_000),
    )?;
    let load = |sets: &[&str]| -> Result<TrainConfig, Failure> {
        let mut config = ConfigLayers::new().with_text("train_step", CONFIG)?;
        for set in sets
            .iter()
            .copied()
            .chain(args.set.iter().map(String::as_str))
        {
            config = config.with_set(set)?;
        }
        Ok(config
            .with_data(&file.to_string_lossy())?
            .with_layout("tp1")?
            .load()?)
    };
    let tokens = load(&[])?.data.seq_len as f64;
    let flops = tokens * (6.0 * 1_003_487_232.0 + 12.0 * (4 * 4096) as f64 * tokens / 2.0);
    let title = format!("a step of {tokens} tokens");
    let mut table = Table::new(title, &["what", "ms", "fastest ms", "TFLOP/s", "GiB"]);
    let row = |name: String, seconds: f64, fastest: String, gib: String| {
        let rate = format!("{:.0}", flops / seconds / 1e12);
        vec![name, format!("{:.1}", seconds * 1e3), fastest, rate, gib]
    };
    let mut text = String::new();
    let timing = Timing {
        steps: args.steps,
        profile: args.profile,
    };
    for (suffix, sets) in OPTIMIZERS {
        let found = steps(timing, load(sets)?)?;
        let gib = format!("{:.1}", found.memory as f64 / f64::from(1 << 30));
        let fastest = format!("{:.1}", found.fastest * 1e3);
        table.row(row(
            format!("megaburn{suffix}"),
            found.seconds,
            fastest,
            gib,
        ));
        text = format!(
            "The host enqueues a step with f32 masters in {:.1} ms; it waits for the GPU once \
            per step, for loss and gradient norm. Loss after {} steps: {:.4}.",
            found.host * 1e3,
            args.steps + 4,
            found.loss
        );
    }
    if args.profile {
        return Ok(());
    }
    let peers = peer_times(args.peer.as_deref())?;
    for (name, milliseconds) in peers.iter().filter(|(name, _)| !name.ends_with(" GiB")) {
        let gib = peers
            .get(&format!("{name} GiB"))
            .map(|gib| format!("{gib:.1}"));
        table.row(row(
            name.clone(),
            milliseconds / 1e3,
            String::new(),
            gib.unwrap_or_default(),
        ));
    }
    report.table(&table);
    report.text(&text);
    report.finish(&args.report)
}

/// The measurements of a run.
pub(super) struct Found {
    /// Seconds of the median step.
    pub(super) seconds: f64,
    /// Seconds of the fastest step.
    fastest: f64,
    /// Median seconds until the host waits for the GPU.
    pub(super) host: f64,
    loss: f64,
    /// Bytes reserved on the GPU after the last step.
    pub(super) memory: u64,
}

/// The number of timed steps, and whether to run one more with the profiler on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    pub(super) steps: usize,
    pub(super) profile: bool,
}

pub(super) fn steps(timing: Timing, config: TrainConfig) -> Result<Found, Failure> {
    let config = Arc::new(config);
    let data = Arc::new(RunData::load(&config)?);
    let device = Device::cuda(0).autodiff();
    let mut trainer = Trainer::new(config.clone(), ProcessGroups::single(0), device, data)?;
    let mut times = Vec::new();
    let mut host_times = Vec::new();
    let mut loss = f64::NAN;
    let mut memory = 0;
    for step in 0..timing.steps + 4 {
        let started = Instant::now();
        let metrics = trainer.step()?;
        let seconds = started.elapsed().as_secs_f64();
        let host = trainer.enqueue_time().as_secs_f64();
        println!(
            "step {step}: {:.1} ms, enqueued in {:.1} ms, loss {:.4}",
            seconds * 1e3,
            host * 1e3,
            metrics.loss
        );
        loss = metrics.loss;
        memory = metrics.memory_bytes;
        if step >= 4 {
            times.push(seconds);
            host_times.push(host);
        }
    }
    if timing.profile {
        let probe = Tensor::<1>::zeros([1], &Device::cuda(0));
        let probe = probe
            .try_into_primitive::<Cube>()
            .expect("the tensor is on a GPU");
        let queue = cuda::CudaQueue::of(&cuda::tensor::from_backend(probe));
        cuda::profiler::captured(&queue.expect("the tensor is on a GPU"), || trainer.step())??;
    }
    // Release this run's memory, so that it does not count in the next run.
    drop(trainer);
    Device::cuda(0).memory_cleanup();
    times.sort_by(f64::total_cmp);
    host_times.sort_by(f64::total_cmp);
    let [seconds, host] = [&times, &host_times].map(|times| times[times.len() / 2]);
    Ok(Found {
        seconds,
        fastest: times[0],
        host,
        loss,
        memory,
    })
}
