//! How the collectives scale with size, over rank threads and over TCP on this host.

use std::{
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use burn::tensor::{DType, TensorData};
use clap::Parser;
use megaburn::collective::{
    CollectiveError, ConnectOptions, Group, GroupOptions, JobToken, RankEnv, ReduceOp, connect,
    free_port, run_threads,
};
use megaburn_benches::{
    Failure,
    collective::{Collective, label},
    report::{Args, Report, Table},
    timing::Times,
};

const SIZES: [usize; 5] = [1 << 10, 16 << 10, 256 << 10, 4 << 20, 64 << 20];
#[derive(Clone, Copy, Debug)]
enum Transport {
    Threads,
    Tcp,
}

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
    let about = "Collectives on f32 data over rank threads and over TCP connections of this host \
                 (the ranks are threads of one process there too). As in nccl-tests, the size S is \
                 a rank's buffer before an all-reduce, reduce-scatter or all-to-all and after an \
                 all-gather, and the bus bandwidth is S / t times 2 (n - 1) / n for an all-reduce \
                 and (n - 1) / n for the others. A time is the median over repetitions of the \
                 slowest rank's.";
    let mut report = Report::new("collectives", about);
    for transport in [Transport::Threads, Transport::Tcp] {
        for ranks in [2, 4] {
            let name = match transport {
                Transport::Threads => "threads",
                Transport::Tcp => "TCP",
            };
            let title = format!("{name}, {ranks} ranks: µs (GB/s bus bandwidth)");
            report.table(&table(title, transport, ranks, args.quick)?);
        }
    }
    report.finish(args)
}

fn table(title: String, transport: Transport, ranks: usize, quick: bool) -> Result<Table, Failure> {
    let head = [
        "size",
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
    ];
    let mut table = Table::new(title, &head);
    let times = measure(transport, ranks, quick)?;
    for (size, times) in SIZES.into_iter().zip(times.chunks(Collective::ALL.len())) {
        let cells = Collective::ALL.into_iter().zip(times).map(|(op, time)| {
            let seconds = time.median();
            let bandwidth = size as f64 / seconds * op.bus_factor(ranks) / 1e9;
            format!("{:.1} ({bandwidth:.2})", seconds * 1e6)
        });
        table.row([label(size)].into_iter().chain(cells).collect());
    }
    Ok(table)
}

/// The times of each operation for each size; a time is the slowest rank's of a repetition.
fn measure(transport: Transport, ranks: usize, quick: bool) -> Result<Vec<Times>, Failure> {
    let options = GroupOptions {
        timeout: Duration::from_secs(60),
        ..Default::default()
    };
    let by_rank = match transport {
        Transport::Threads => {
            let results = run_threads(ranks, options, |world| run_rank(&world, quick));
            results.into_iter().collect::<Result<Vec<_>, _>>()?
        }
        Transport::Tcp => over_tcp(ranks, options, |world| run_rank(&world, quick))?,
    };
    let cells = (0..SIZES.len() * Collective::ALL.len()).map(|cell| {
        let mut times = Times::default();
        for repetition in 0..by_rank[0][cell].len() {
            let slowest = by_rank.iter().map(|rank| rank[cell][repetition]).max();
            times.push(slowest.expect("there is at least one rank"));
        }
        times
    });
    Ok(cells.collect())
}

/// Runs `body` on `ranks` threads, each a rank, with TCP connections between them.
fn over_tcp<T: Send>(
    ranks: usize,
    options: GroupOptions,
    body: impl Fn(Group) -> Result<T, CollectiveError> + Sync,
) -> Result<Vec<T>, Failure> {
    let master_port = free_port()?;
    let world_size = ranks;
    let body = &body;
    thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                let env = RankEnv {
                    rank,
                    world_size,
                    local_rank: rank,
                    local_world_size: world_size,
                    is_local_world_known: true,
                    ranks_per_gpu: 1,
                    master_addr: "127.0.0.1".into(),
                    master_port,
                    job_token: JobToken::default(),
                };
                scope.spawn(move || body(connect(&ConnectOptions::new(env).with_group(options))?))
            })
            .collect();
        let join = |thread: thread::ScopedJoinHandle<'_, Result<T, CollectiveError>>| {
            Ok(thread.join().map_err(|_| "a rank panicked")??)
        };
        threads.into_iter().map(join).collect()
    })
}

/// This rank's times: a list of repetitions for each size and operation.
fn run_rank(world: &Group, quick: bool) -> Result<Vec<Vec<Duration>>, CollectiveError> {
    let mut times = Vec::new();
    for size in SIZES {
        // A repetition of a small collective makes several calls: one is too short for the clock.
        let calls = ((1 << 20) / size).clamp(1, 32);
        let repetitions = if quick {
            2
        } else {
            ((256 << 20) / size).clamp(5, 30)
        };
        for op in Collective::ALL {
            repeat(op, world, size, calls)?;
            let repeat = |_| repeat(op, world, size, calls);
            times.push((0..repetitions).map(repeat).collect::<Result<_, _>>()?);
        }
    }
    Ok(times)
}

/// The mean time of one of `calls` calls. Inputs are made before the clock starts.
fn repeat(
    op: Collective,
    world: &Group,
    size: usize,
    calls: usize,
) -> Result<Duration, CollectiveError> {
    let inputs: Vec<_> = (0..calls).map(|_| input(op, world, size)).collect();
    world.barrier()?;
    let start = Instant::now();
    for input in inputs {
        call(op, world, input)?;
    }
    Ok(start.elapsed() / calls as u32)
}

fn input(op: Collective, world: &Group, size: usize) -> Vec<TensorData> {
    let share = size / world.size();
    match op {
        Collective::AllReduce | Collective::ReduceScatter => vec![data(size)],
        Collective::AllGather => vec![data(share)],
        Collective::AllToAll => (0..world.size()).map(|_| data(share)).collect(),
    }
}

fn call(op: Collective, world: &Group, mut input: Vec<TensorData>) -> Result<(), CollectiveError> {
    let mut only = || input.pop().expect("there is one input");
    match op {
        Collective::AllReduce => world.all_reduce(only(), ReduceOp::Sum).map(drop),
        Collective::AllGather => world.all_gather(only()).map(drop),
        Collective::ReduceScatter => world.reduce_scatter(only(), ReduceOp::Sum).map(drop),
        Collective::AllToAll => world.all_to_all(input).map(drop),
    }
}

/// A tensor of f32 ones that takes `bytes` bytes.
fn data(bytes: usize) -> TensorData {
    let elements = bytes / DType::F32.size();
    TensorData::new(vec![1.0f32; elements], [elements])
}
