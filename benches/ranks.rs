//! Compares one rank on all cores with several ranks that share them, to show what tensor, sequence
//! and data parallelism cost and gain on the CPU.

use std::{
    process::ExitCode,
    thread::available_parallelism,
    time::{Duration, Instant},
};

use clap::Parser;
use megaburn::{
    collective::{Group, GroupOptions, ProcessGroups, run_threads},
    mesh::Layout,
    models::DecoderConfig,
};
use megaburn_benches::{
    Failure,
    llama::{Clip, Megaburn, default_model, global_batch, larger_model},
    report::{Args, Report, Table},
    timing::{self, Times, millis},
};

/// The rayon pool that a rank computes on.
#[derive(Clone, Copy, Debug)]
enum Pool {
    /// A pool per rank, with this number of threads.
    Own(usize),
    /// The process's pool of one thread, which all ranks share.
    Shared,
}

/// The measured layouts. The first is the baseline of the others.
const LAYOUTS: [(&str, Pool); 12] = [
    ("dp1", Pool::Own(2)),
    ("dp1", Pool::Own(1)),
    ("tp2", Pool::Own(1)),
    ("tp2-sp", Pool::Own(1)),
    ("tp2-sp", Pool::Shared),
    ("dp2", Pool::Own(1)),
    ("dp2", Pool::Shared),
    ("tp4", Pool::Own(1)),
    ("tp2-dp2", Pool::Own(1)),
    ("tp2-dp2-sp", Pool::Own(1)),
    ("tp2-dp2-sp", Pool::Shared),
    ("dp4", Pool::Own(1)),
];
const WARM_UP: usize = 1;

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Failure> {
    rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .build_global()?;
    let cores = available_parallelism()?.get();
    let about = format!(
        "Training steps (forward, backward, gradient reduction, norm, clipping, AdamW) of rank \
        threads on {cores} cores. A rank's tensors are computed on its own rayon pool, or on a \
        pool of a single thread that all ranks share. The global batch is {} samples in every \
        layout, one micro-batch per rank. Layouts alternate; the time of a step is the slowest \
        rank's.",
        global_batch(),
    );
    let mut report = Report::new("ranks", about);
    let models = [
        ("default model", default_model(), [3, 8]),
        ("twice as wide", larger_model(), [2, 4]),
    ];
    for (name, (config, seq_len), repeats) in models {
        let [rounds, steps] = if args.quick { [1, 2] } else { repeats };
        let title = format!(
            "{name}: hidden {}, ffn {}, {} layers, {:.2} M parameters, {} steps per layout",
            config.hidden,
            config.ffn,
            config.layers,
            config
                .whole_plan()
                .expect("the sizes are valid")
                .num_global() as f64
                / 1e6,
            rounds * steps,
        );
        let times = measure(&config, seq_len, rounds, steps)?;
        report.table(&table(title, &times, seq_len * global_batch()));
    }
    report.finish(args)
}

fn table(title: String, times: &[Times], tokens: usize) -> Table {
    let head = [
        "layout",
        "ranks",
        "pool",
        "median ms",
        "min ms",
        "tok/s",
        "against one rank",
    ];
    let mut table = Table::new(title, &head);
    for ((text, pool), time) in LAYOUTS.into_iter().zip(times) {
        let layout: Layout = text.parse().expect("the list is valid");
        table.row(vec![
            text.to_string(),
            layout.world_size().to_string(),
            match pool {
                Pool::Own(1) => "own, 1 thread".to_string(),
                Pool::Own(threads) => format!("own, {threads} threads"),
                Pool::Shared => "shared, 1 thread".to_string(),
            },
            millis(time.median()),
            millis(time.min()),
            format!("{:.0}", tokens as f64 / time.median()),
            format!("{:.2}x", times[0].median() / time.median()),
        ]);
    }
    table
}

/// The step times of every layout. Layouts take turns with a few steps each, so that other load on
/// the machine does not hit only one of them.
fn measure(
    config: &DecoderConfig,
    seq_len: usize,
    rounds: usize,
    steps: usize,
) -> Result<Vec<Times>, Failure> {
    let mut times = vec![Times::default(); LAYOUTS.len()];
    for _ in 0..rounds {
        for ((text, pool), times) in LAYOUTS.into_iter().zip(&mut times) {
            times.extend(run_layout(config, seq_len, text.parse()?, pool, steps)?);
        }
    }
    Ok(times)
}

fn run_layout(
    config: &DecoderConfig,
    seq_len: usize,
    layout: Layout,
    pool: Pool,
    steps: usize,
) -> Result<Times, Failure> {
    let options = GroupOptions {
        timeout: Duration::from_secs(60),
        ..Default::default()
    };
    let ranks = run_threads(layout.world_size(), options, |world| {
        let run = || run_rank(&world, config, seq_len, layout, steps);
        match pool {
            Pool::Own(threads) => timing::pool(threads).install(run),
            Pool::Shared => run(),
        }
    });
    let ranks = ranks.into_iter().collect::<Result<Vec<_>, _>>()?;
    let mut times = Times::default();
    for step in 0..steps {
        times.push(
            ranks
                .iter()
                .map(|rank| rank[step])
                .max()
                .expect("there is at least one rank"),
        );
    }
    Ok(times)
}

fn run_rank(
    world: &Group,
    config: &DecoderConfig,
    seq_len: usize,
    layout: Layout,
    steps: usize,
) -> Result<Vec<Duration>, Failure> {
    let groups = ProcessGroups::new(world, layout)?;
    let mut rank = Megaburn::new(config, seq_len, groups)?;
    for _ in 0..WARM_UP {
        rank.step(Clip::ToOne)?;
    }
    let timed = |_| {
        world.barrier()?;
        let start = Instant::now();
        rank.step(Clip::ToOne)?;
        Ok(start.elapsed())
    };
    (0..steps).map(timed).collect()
}
