//! One rank on all cores against ranks that share them: what tensor, sequence and data parallelism
//! cost and gain on the CPU.

use std::{
    process::ExitCode,
    thread::available_parallelism,
    time::{Duration, Instant},
};

use clap::Parser;
use megaburn::{
    collective::{Group, GroupOptions, ProcessGroups, run_threads},
    mesh::Layout,
    models::LlamaConfig,
};
use megaburn_benches::{
    Failure,
    llama::{Clip, Megaburn, default_model, global_batch, larger_model},
    report::{Args, Report, Table},
    timing::{Times, millis, pool},
};

/// The layouts, each with the rayon threads of a rank. The first is what the others are held
/// against.
const LAYOUTS: [(&str, usize); 9] = [
    ("dp1", 2),
    ("dp1", 1),
    ("tp2", 1),
    ("tp2-sp", 1),
    ("dp2", 1),
    ("tp4", 1),
    ("tp2-dp2", 1),
    ("tp2-dp2-sp", 1),
    ("dp4", 1),
];
const WARM_UP: usize = 2;

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
    let cores = available_parallelism()?.get();
    let about = format!(
        "Training steps (forward, backward, gradient reduction, norm, clipping, AdamW) of rank \
         threads on {cores} cores: each rank computes on a rayon pool of its own. The global batch \
         is {} samples whatever the layout, a micro-batch a rank. Layouts take turns; the time of a \
         step is the slowest rank's.",
        global_batch(),
    );
    let mut report = Report::new("ranks", about);
    let models = [("default model", default_model(), 12), ("twice as wide", larger_model(), 5)];
    for (name, (config, seq_len), steps) in models {
        let (rounds, steps) = if args.quick { (1, 2) } else { (3, steps) };
        let title = format!(
            "{name}: hidden {}, ffn {}, {} layers, {:.2} M parameters, {} steps a layout",
            config.hidden,
            config.ffn,
            config.layers,
            config.num_params() as f64 / 1e6,
            rounds * steps,
        );
        let times = measure(&config, seq_len, rounds, steps)?;
        report.table(&table(title, &times, seq_len * global_batch()));
    }
    report.finish(args)
}

fn table(title: String, times: &[Times], tokens: usize) -> Table {
    let head =
        ["layout", "ranks", "threads a rank", "median ms", "min ms", "tok/s", "against one rank"];
    let mut table = Table::new(title, &head);
    for ((text, threads), time) in LAYOUTS.into_iter().zip(times) {
        let layout: Layout = text.parse().expect("the list is right");
        table.row(vec![
            text.to_string(),
            layout.world_size().to_string(),
            threads.to_string(),
            millis(time.median()),
            millis(time.min()),
            format!("{:.0}", tokens as f64 / time.median()),
            format!("{:.2}x", times[0].median() / time.median()),
        ]);
    }
    table
}

/// The step times of every layout, a few at a time in turns.
fn measure(
    config: &LlamaConfig,
    seq_len: usize,
    rounds: usize,
    steps: usize,
) -> Result<Vec<Times>, Failure> {
    let mut times = vec![Times::default(); LAYOUTS.len()];
    for _ in 0..rounds {
        for ((text, threads), times) in LAYOUTS.into_iter().zip(&mut times) {
            times.extend(run_layout(config, seq_len, text.parse()?, threads, steps)?);
        }
    }
    Ok(times)
}

fn run_layout(
    config: &LlamaConfig,
    seq_len: usize,
    layout: Layout,
    threads: usize,
    steps: usize,
) -> Result<Times, Failure> {
    let options = GroupOptions { timeout: Duration::from_secs(60), ..Default::default() };
    let ranks = run_threads(layout.world_size(), options, |world| {
        pool(threads).install(|| run_rank(&world, config, seq_len, layout, steps))
    });
    let ranks = ranks.into_iter().collect::<Result<Vec<_>, _>>()?;
    let mut times = Times::default();
    for step in 0..steps {
        times.push(ranks.iter().map(|rank| rank[step]).max().expect("there are ranks"));
    }
    Ok(times)
}

fn run_rank(
    world: &Group,
    config: &LlamaConfig,
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
