//! The cost of data parallelism at each ZeRO stage, compared with PyTorch's FSDP2.
//!
//! ```sh
//! torchrun --nproc-per-node 8 benches/peer/fsdp.py --layers 12 > peer.txt
//! megaburn launch --nproc 8 -- bench-data-parallel --layers 12 --peer peer.txt
//! ```

use std::{ffi::OsString, path::PathBuf, process::ExitCode};

use clap::Parser;
use megaburn::collective::Group;

use super::{
    peer_times,
    ranks::{Found, GpuRank, Steps, gib},
};
use crate::{
    Failure,
    report::{Args, Report, Table},
};

#[derive(Debug, Parser)]
struct DataParallelArgs {
    #[command(flatten)]
    report: Args,
    /// The output of `peer/fsdp.py` on the same GPUs.
    #[arg(long, value_name = "FILE")]
    peer: Option<PathBuf>,
    /// Number of layers: 12 fit without sharding, 32 are Llama-3-8B.
    #[arg(long, default_value_t = 12)]
    layers: usize,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 8192)]
    seq_len: usize,
    /// Micro-batches of a step.
    #[arg(long, default_value_t = 1)]
    micro_batches: usize,
    /// ZeRO stages to measure.
    #[arg(long, value_delimiter = ',', default_value = "0,1,2,3")]
    zero: Vec<u8>,
    /// Whether communication overlaps computation (true) or comes at the end of a step (false).
    #[arg(long, value_delimiter = ',', default_value = "false,true")]
    overlap: Vec<bool>,
    /// Skip the run of each GPU by itself, without communication.
    #[arg(long)]
    no_alone: bool,
    /// Settings on top of the measurement's own, as in `megaburn train --set`.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Number of timed steps.
    #[arg(long, default_value_t = 10)]
    steps: usize,
    /// Poll the memory that tensors occupy while steps run, which slows the steps down.
    #[arg(long)]
    memory: bool,
}

/// Runs one rank of the measurement, as torchrun's environment variables say.
pub fn main(command: Vec<OsString>) -> ExitCode {
    match run(&DataParallelArgs::parse_from(command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The run of a row: a ZeRO stage, and whether communication overlaps computation. `None` is each
/// GPU by itself.
type Way = Option<(u8, bool)>;

fn run(args: &DataParallelArgs) -> Result<(), Failure> {
    let tokens = 4 * args.seq_len * Steps::of(args.steps).num() * args.micro_batches;
    let rank = GpuRank::start("bench-data-parallel", tokens, None)?;
    let world = &rank.world;
    let mut ways: Vec<Way> = if args.no_alone { vec![] } else { vec![None] };
    let stages = args
        .zero
        .iter()
        .flat_map(|&zero| args.overlap.iter().map(move |&way| (zero, way)));
    ways.extend(stages.map(Some));
    let mut found = Vec::new();
    for way in ways {
        let one = Group::single(world.seed());
        let (group, zero, overlap) = match way {
            None => (&one, 0, false),
            Some((zero, overlap)) => (world, zero, overlap),
        };
        let mut config = rank.config(
            &format!("dp{}", group.size()),
            args.layers,
            args.seq_len,
            &args.set.iter().map(String::as_str).collect::<Vec<_>>(),
        )?;
        config.train.global_batch = group.size() * args.micro_batches;
        config.parallel.zero = zero;
        config.parallel.overlap = overlap;
        found.push((
            way,
            rank.steps(config, group, Steps::of(args.steps), args.memory)?,
        ));
    }
    if world.rank() == 0 {
        report(args, world.size(), &found)
    } else {
        Ok(())
    }
}

fn report(args: &DataParallelArgs, ranks: usize, found: &[(Way, Found)]) -> Result<(), Failure> {
    let DataParallelArgs {
        layers,
        seq_len,
        micro_batches,
        ..
    } = args;
    let params = found.first().map_or(0, |(_, first)| first.params);
    let about = format!(
        "One optimizer step of {layers} layers of Llama-3-8B's shape (vocabulary 128256) in bf16 \
        with f32 gradients and masters, {micro_batches} x {seq_len} tokens per GPU, on {ranks} \
        GPUs, one process each. The time is the slowest rank's median from the end of a step to \
        the end of the next, including reading the loss. The first row is each GPU by itself, without any \
        communication; the extra time of the other rows is exposed communication, except that \
        sharded optimizers do only a part of the update. GiB are the reserved GPU memory, here \
        after the last step, for PyTorch at the peak. With `--memory`, also the memory that \
        tensors use, and the same in bytes per parameter ({params} parameters) next to \
        Megatron's formula, which excludes activations: compare them with few tokens (`--seq-len \
        128`)."
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
    let set: String = args.set.iter().map(|set| format!(", {set}")).collect();
    let title = format!("{ranks} GPUs, {layers} layers, {seq_len} tokens{set}");
    let mut table = Table::new(title, &head);
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
            found
                .tensors
                .map_or(String::new(), |bytes| format!("{:.1}", gib(bytes))),
            found.tensors.map_or(String::new(), |bytes| {
                format!("{:.2}", bytes as f64 / params as f64)
            }),
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
            peers
                .get(&format!("{name} GiB"))
                .map_or(String::new(), |gib| format!("{gib:.1}")),
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

/// Bytes per parameter: bf16 parameters, f32 gradients, and 12 bytes of masters and moments. ZeRO-1
/// follows Megatron-LM's table for its distributed optimizer; ZeRO-2 and 3 also shard the gradients
/// and the parameters.
fn bytes_per_parameter(way: Way, ranks: usize) -> f64 {
    let of_ranks = |bytes: f64| bytes / ranks as f64;
    match way {
        None | Some((0, _)) => 18.0,
        Some((1, _)) => 6.0 + of_ranks(12.0),
        Some((2, _)) => 2.0 + of_ranks(16.0),
        Some(_) => of_ranks(18.0),
    }
}
