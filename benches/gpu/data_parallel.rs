//! What data parallelism costs, stage by stage of ZeRO, beside PyTorch's FSDP2.
//!
//! ```sh
//! torchrun --nproc-per-node 8 benches/peer/fsdp.py --layers 12 > peer.txt
//! megaburn launch --nproc 8 -- bench-data-parallel --layers 12 --peer peer.txt
//! ```

use std::{
    ffi::OsString,
    fs,
    path::PathBuf,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use burn::prelude::Device;
use clap::Parser;
use megaburn::{
    collective::{
        ConnectOptions, Group, ProcessGroups, RankEnv, connect, launcher::tie_to_launcher,
    },
    cuda,
    train::{ConfigLayers, RunData, TrainConfig, Trainer},
};

use super::peer_times;
use crate::{
    Failure,
    report::{Args, Report, Table},
};

/// Llama-3-8B but for its depth.
const CONFIG: &str = r#"
[model]
hidden = 4096
ffn = 14336
heads = 32
kv_heads = 8
vocab = 128256
rope_theta = 500000.0
tied = false
[train]
micro_batch = 1
dtype = "bf16"
[optimizer]
lr = 1e-5
min_lr = 1e-5
warmup_steps = 0
"#;

#[derive(Debug, Parser)]
struct DataParallelArgs {
    #[command(flatten)]
    report: Args,
    /// What `peer/fsdp.py` printed on the same GPUs.
    #[arg(long, value_name = "FILE")]
    peer: Option<PathBuf>,
    /// Layers; 12 fit where nothing is shared out, 32 are Llama-3-8B.
    #[arg(long, default_value_t = 12)]
    layers: usize,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 8192)]
    seq_len: usize,
    /// Micro-batches of a step.
    #[arg(long, default_value_t = 1)]
    micro_batches: usize,
    /// Stages of ZeRO.
    #[arg(long, value_delimiter = ',', default_value = "0,1,2,3")]
    zero: Vec<u8>,
    /// Whether ranks send while they compute, or at the end of a step.
    #[arg(long, value_delimiter = ',', default_value = "false,true")]
    overlap: Vec<bool>,
    /// Leaves out each GPU by itself.
    #[arg(long)]
    no_alone: bool,
    /// Steps that are timed.
    #[arg(long, default_value_t = 10)]
    steps: usize,
    /// Asks again and again how much memory tensors take, which slows the steps down.
    #[arg(long)]
    memory: bool,
}

/// The measurement: one rank of it, as torchrun's environment names say.
pub fn main(command: Vec<OsString>) -> ExitCode {
    match run(&DataParallelArgs::parse_from(command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// What a row is of: a stage, and whether ranks send while they compute. None: each GPU by itself.
type Way = Option<(u8, bool)>;

fn run(args: &DataParallelArgs) -> Result<(), Failure> {
    tie_to_launcher()?;
    cuda::start()?;
    let env = RankEnv::from_env()?;
    let env =
        env.ok_or("start it with `megaburn launch --nproc N -- bench-data-parallel`, or torchrun")?;
    let device = Device::cuda(env.local_rank);
    let world = connect(&ConnectOptions::new(env))?;
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("text.txt");
    let sentences = 4 * args.seq_len * (args.steps + 4) * args.micro_batches * world.size() / 40;
    fs::write(&file, "The quick brown fox jumps over the lazy dog. ".repeat(sentences))?;
    let config = |ranks: usize, zero: u8, overlap: bool| -> Result<TrainConfig, Failure> {
        let layers = ConfigLayers::new().with_text("data_parallel", CONFIG)?;
        let layers = layers.with_data(&file.to_string_lossy())?;
        let mut config = layers.with_layout(&format!("dp{ranks}"))?.load()?;
        (config.model.layers, config.data.seq_len) = (args.layers, args.seq_len);
        config.train.global_batch = ranks * args.micro_batches;
        (config.parallel.zero, config.parallel.overlap) = (zero, overlap);
        Ok(config)
    };
    let mut ways: Vec<Way> = if args.no_alone { vec![] } else { vec![None] };
    let stages =
        args.zero.iter().flat_map(|&zero| args.overlap.iter().map(move |&way| (zero, way)));
    ways.extend(stages.map(Some));
    let mut found = Vec::new();
    for way in ways {
        let one = Group::single(world.seed());
        let (group, config) = match way {
            None => (&one, config(1, 0, false)?),
            Some((zero, overlap)) => (&world, config(world.size(), zero, overlap)?),
        };
        found.push((way, steps(args, config, group, &world, &device)?));
    }
    if world.rank() == 0 { report(args, world.size(), &found) } else { Ok(()) }
}

fn report(args: &DataParallelArgs, ranks: usize, found: &[(Way, Found)]) -> Result<(), Failure> {
    let DataParallelArgs { layers, seq_len, micro_batches, .. } = args;
    let params = found.first().map_or(0, |(_, first)| first.params);
    let about = format!(
        "One optimizer step of {layers} layers of Llama-3-8B's shape (vocabulary 128256) in bf16 with f32 \
         gradients and masters, {micro_batches} sequences of {seq_len} tokens a GPU, on {ranks} GPUs, one \
         process each. The time is the slowest rank's median from the end of a step to the end of the next, its \
         loss read. The first row is each GPU by itself, without any communication; how much longer \
         the others take is what communication is not hidden, but for the update, which those that \
         share it out do a part of. GiB are what is reserved on the GPU, here after the last step, \
         by PyTorch at most. With `--memory`, what tensors take at most of that, also as bytes of each of \
         {params} parameters, beside Megatron's formula, which has no activations in it: compare them at a few \
         tokens (`--seq-len 128`)."
    );
    let head = [
        "what",
        "overlap",
        "ms",
        "tokens/s/GPU",
        "of alone",
        "TFLOP/s",
        "GiB",
        "of tensors",
        "bytes/parameter",
        "formula",
        "loss",
    ];
    let mut table = Table::new(format!("{ranks} GPUs, {layers} layers, {seq_len} tokens"), &head);
    let alone = found.iter().find(|(way, _)| way.is_none());
    let of_alone = |seconds: f64| match alone {
        Some((_, alone)) => format!("{:.3}", alone.seconds / seconds),
        None => String::new(),
    };
    for (way, found) in found {
        let (what, overlap) = match way {
            None => ("alone".to_string(), "-"),
            Some((zero, true)) => (format!("zero {zero}"), "yes"),
            Some((zero, false)) => (format!("zero {zero}"), "no"),
        };
        table.row(vec![
            what,
            overlap.into(),
            format!("{:.1}", found.seconds * 1e3),
            format!("{:.0}", (micro_batches * seq_len) as f64 / found.seconds),
            of_alone(found.seconds),
            format!("{:.0}", found.tflops),
            format!("{:.1}", gib(found.memory)),
            found.tensors.map_or(String::new(), |bytes| format!("{:.1}", gib(bytes))),
            found
                .tensors
                .map_or(String::new(), |bytes| format!("{:.2}", bytes as f64 / params as f64)),
            format!("{:.2}", bytes_per_parameter(*way, ranks)),
            format!("{:.4}", found.loss),
        ]);
    }
    let peers = peer_times(args.peer.as_deref())?;
    for (name, milliseconds) in peers.iter().filter(|(name, _)| !name.ends_with(" GiB")) {
        let seconds = milliseconds / 1e3;
        table.row(vec![
            name.clone(),
            String::new(),
            format!("{milliseconds:.1}"),
            format!("{:.0}", (micro_batches * seq_len) as f64 / seconds),
            of_alone(seconds),
            String::new(),
            peers.get(&format!("{name} GiB")).map_or(String::new(), |gib| format!("{gib:.1}")),
            String::new(),
            String::new(),
            String::new(),
            String::new(),
        ]);
    }
    let mut report = Report::new("data_parallel", &about);
    report.table(&table);
    report.finish(&args.report)
}

/// Of bf16 parameters, f32 gradients, and 12 bytes of masters and moments: Megatron-LM's table of its
/// distributed optimizer, and the same of gradients and parameters that are shared out.
fn bytes_per_parameter(way: Way, ranks: usize) -> f64 {
    let of_ranks = |bytes: f64| bytes / ranks as f64;
    match way {
        None | Some((0, _)) => 18.0,
        Some((1, _)) => 6.0 + of_ranks(12.0),
        Some((2, _)) => 2.0 + of_ranks(16.0),
        Some(_) => of_ranks(18.0),
    }
}

/// What was seen of a run of some steps: of the slowest rank, and of the one with most memory in use.
struct Found {
    seconds: f64,
    tflops: f64,
    /// Reserved, in bytes.
    memory: u64,
    /// The most that tensors took of it, if that was asked for.
    tensors: Option<u64>,
    /// Of the whole model.
    params: usize,
    loss: f64,
}

fn steps(
    args: &DataParallelArgs,
    config: TrainConfig,
    group: &Group,
    world: &Group,
    device: &Device,
) -> Result<Found, Failure> {
    let layout = config.layout(None)?;
    let data = Arc::new(RunData::load(&config)?);
    let groups = ProcessGroups::new(group, layout)?;
    let device = device.clone().autodiff();
    let mut trainer = Trainer::new(Arc::new(config), groups, device.clone(), data)?;
    let (mut times, mut last) = (Vec::new(), None);
    let all = || -> Result<(), Failure> {
        for step in 0..args.steps + 4 {
            let started = Instant::now();
            last = Some(trainer.step()?);
            if step >= 4 {
                times.push(started.elapsed().as_secs_f64());
            }
        }
        Ok(())
    };
    let tensors = most_allocated(args.memory.then(|| device.clone().inner()), all)?;
    let params = trainer.plan().num_global();
    // The next run's memory is its own.
    drop(trainer);
    device.inner().memory_cleanup();
    times.sort_by(f64::total_cmp);
    let last = last.ok_or("no step was made")?;
    let mine = [times[times.len() / 2], last.memory_bytes as f64, tensors as f64];
    let slowest = world.all_reduce(mine.into(), megaburn::collective::ReduceOp::Max)?;
    let slowest = slowest.as_slice::<f64>().map_err(|error| format!("{error:?}"))?;
    let tflops = last.tflops * (last.tokens as f64 / last.tokens_per_second) / slowest[0];
    let [memory, tensors] = [slowest[1], slowest[2]].map(|bytes| bytes as u64);
    let tensors = args.memory.then_some(tensors);
    Ok(Found { seconds: slowest[0], tflops, memory, tensors, params, loss: last.loss })
}

/// The most bytes that tensors on a device took while `work` ran, if one is given.
fn most_allocated(
    device: Option<Device>,
    work: impl FnOnce() -> Result<(), Failure>,
) -> Result<u64, Failure> {
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        let watch = || {
            let mut most = 0;
            while !is_done.load(Ordering::Relaxed) {
                most = most.max(device.as_ref().and_then(cuda::memory::allocated).unwrap_or(0));
                thread::sleep(Duration::from_micros(200));
            }
            most
        };
        let watch = device.is_some().then(|| scope.spawn(watch));
        let done = work();
        is_done.store(true, Ordering::Relaxed);
        let most = watch.map_or(Ok(0), thread::ScopedJoinHandle::join);
        done?;
        most.map_err(|_| "the watch of memory panicked".into())
    })
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}
