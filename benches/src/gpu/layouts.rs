//! Times layouts, compared with a peer's.
//!
//! ```sh
//! torchrun --nproc-per-node 2 benches/peer/megatron_core.py --pp 2 --layers 12 \
//!     --micro-batches 8 > peer.txt
//! megaburn launch --nproc 2 -- bench-layouts --layers 12 --micro-batches 8,16 --peer peer.txt \
//!     pp2 "pp2 parallel.schedule=zb-h1" "tp2-sp" "dp2 parallel.zero=1"
//! ```

use std::{ffi::OsString, path::PathBuf, process::ExitCode};

use clap::Parser;

use super::{
    peer_times,
    ranks::{Found, GpuRank, Steps, gib},
};
use crate::{
    Failure,
    report::{Args, Report, Table},
};

#[derive(Debug, Parser)]
struct LayoutsArgs {
    #[command(flatten)]
    report: Args,
    /// The output of `peer/megatron_core.py` on the same GPUs.
    #[arg(long, value_name = "FILE")]
    peer: Option<PathBuf>,
    /// Layers of Llama-3-8B's shape.
    #[arg(long, default_value_t = 12)]
    layers: usize,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 8192)]
    seq_len: usize,
    /// Micro-batches of a step on each data-parallel rank; several values are measured one by one.
    #[arg(long, value_delimiter = ',', default_value = "8")]
    micro_batches: Vec<usize>,
    /// Number of timed steps.
    #[arg(long, default_value_t = 6)]
    steps: usize,
    /// Number of warm-up steps before the timed ones.
    #[arg(long, default_value_t = 4)]
    warmup: usize,
    /// Poll the memory that tensors occupy while steps run, which slows the steps down.
    #[arg(long)]
    memory: bool,
    /// Train on documents with a long tail of lengths, up to the longest sequence, for
    /// `data.documents=true`.
    #[arg(long)]
    long_tail: bool,
    /// Layouts to measure, each with its settings: `"pp2 parallel.schedule=zb-h1"`.
    #[arg(required = true, value_name = "LAYOUT [KEY=VALUE ..]")]
    runs: Vec<String>,
}

/// Runs one rank of the measurement, as torchrun's environment variables say.
pub fn main(command: Vec<OsString>) -> ExitCode {
    match run(&LayoutsArgs::parse_from(command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Peak TFLOP/s of an H100 or H200 in dense bf16 GEMMs, without sparsity.
const PEAK_TFLOPS: f64 = 989.0;

/// The result of a run with a number of micro-batches.
struct Row<'a> {
    run: &'a str,
    micro_batches: usize,
    pp: usize,
    found: Found,
}

fn run(args: &LayoutsArgs) -> Result<(), Failure> {
    let most = args.micro_batches.iter().max().copied().unwrap_or(1);
    let steps = Steps {
        warmup: args.warmup,
        timed: args.steps,
    };
    // The text must suffice for the longest sequence, and a run's settings may set its length.
    let longest = |run: &String| {
        let lens = run
            .split_whitespace()
            .filter_map(|word| word.strip_prefix("data.seq_len="));
        lens.filter_map(|len| len.parse::<usize>().ok()).max()
    };
    let longest = args
        .runs
        .iter()
        .filter_map(longest)
        .max()
        .unwrap_or(0)
        .max(args.seq_len);
    // A twentieth of the text is for validation and needs a sequence too, hence the 20.
    let tokens = longest * (4 * steps.num() * most + 20);
    let rank = GpuRank::start("bench-layouts", tokens, args.long_tail.then_some(longest))?;
    let mut rows = Vec::new();
    for run in &args.runs {
        let mut words = run.split_whitespace();
        let layout = words.next().ok_or("give at least one layout")?;
        let settings: Vec<&str> = words.collect();
        for &micro_batches in &args.micro_batches {
            let mut config = rank.config(layout, args.layers, args.seq_len, &settings)?;
            let layout = config.layout(None)?;
            config.train.global_batch = layout.dp * micro_batches;
            let found = rank.steps(config, &rank.world, steps, args.memory)?;
            if rank.world.rank() == 0 {
                // Printed at once, so that a run stopped later does not lose it, and per step,
                // since steps over documents differ and are compared one by one.
                let each: Vec<String> = found
                    .each
                    .iter()
                    .map(|seconds| format!("{:.1}", seconds * 1e3))
                    .collect();
                println!(
                    "{run}, {micro_batches} micro-batches: rank 0 {} ms",
                    each.join(", ")
                );
            }
            rows.push(Row {
                run,
                micro_batches,
                pp: layout.pp,
                found,
            });
        }
    }
    if rank.world.rank() == 0 {
        report(args, rank.world.size(), &rows)
    } else {
        Ok(())
    }
}

fn report(args: &LayoutsArgs, ranks: usize, rows: &[Row<'_>]) -> Result<(), Failure> {
    let LayoutsArgs {
        layers, seq_len, ..
    } = args;
    let about = format!(
        "One optimizer step of {layers} layers of Llama-3-8B's shape (vocabulary 128256) in bf16 \
        with f32 gradients and masters, sequences of {seq_len} tokens unless the row says \
        otherwise, one per micro-batch, on {ranks} GPUs, one process each. The time is the \
        slowest rank's median, including reading the loss, and so are the rates; GiB are the reserved memory \
        of the fullest GPU after the last step. The bubble is the part of the step beyond the \
        time that its micro-batches take at the marginal rate (from the runs with the most and \
        the fewest micro-batches), including the update; next to it the formula for one chunk, \
        (p - 1) / (m + p - 1)."
    );
    let head = [
        "layout",
        "micro-batches",
        "ms",
        "tokens/s/GPU",
        "TFLOP/s",
        "MFU",
        "GiB",
        "of tensors",
        "bubble",
        "formula",
        "loss",
    ];
    let mut table = Table::new(
        format!("{ranks} GPUs, {layers} layers, {seq_len} tokens"),
        &head,
    );
    for row in rows {
        let Row {
            run,
            micro_batches,
            pp,
            found,
        } = row;
        let same = || rows.iter().filter(|other| other.run == *run);
        let least = same().min_by_key(|row| row.micro_batches);
        let most = same().max_by_key(|row| row.micro_batches);
        let pace = least.zip(most).map(|(a, b)| {
            (b.found.seconds - a.found.seconds) / (b.micro_batches - a.micro_batches) as f64
        });
        let bubble = pace.map(|pace| 1.0 - *micro_batches as f64 * pace / found.seconds);
        let formula = (pp - 1) as f64 / (micro_batches + pp - 1) as f64;
        table.row(vec![
            run.to_string(),
            micro_batches.to_string(),
            format!("{:.1}", found.seconds * 1e3),
            format!("{:.0}", found.tokens_per_second),
            format!("{:.0}", found.tflops),
            format!("{:.3}", found.tflops / PEAK_TFLOPS),
            format!("{:.1}", gib(found.memory)),
            found
                .tensors
                .map_or(String::new(), |bytes| format!("{:.1}", gib(bytes))),
            bubble
                .filter(|b| b.is_finite())
                .map_or(String::new(), |b| format!("{b:.3}")),
            if *pp > 1 {
                format!("{formula:.3}")
            } else {
                String::new()
            },
            format!("{:.4}", found.loss),
        ]);
    }
    let peers = peer_times(args.peer.as_deref())?;
    let of = |name: &str, what: &str| peers.get(&format!("{name} {what}")).copied();
    for (name, milliseconds) in &peers {
        let (Some(micro_batches), Some(tokens)) = (of(name, "micro-batches"), of(name, "tokens"))
        else {
            continue;
        };
        let mut row = vec![
            name.clone(),
            format!("{micro_batches}"),
            format!("{milliseconds:.1}"),
        ];
        row.push(format!("{:.0}", tokens / milliseconds * 1e3));
        row.extend([String::new(), String::new()]);
        row.push(of(name, "GiB").map_or(String::new(), |gib| format!("{gib:.1}")));
        row.resize(head.len(), String::new());
        table.row(row);
    }
    let mut report = Report::new("layouts", &about);
    report.table(&table);
    report.finish(&args.report)
}
