//! What it costs many ranks to meet, to agree and to hear of a failure: threads of one process, over
//! TCP on this host.

use std::{
    fs,
    process::{Child, Command, ExitCode, Stdio},
    sync::{Barrier, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use clap::Parser;
use megaburn::collective::{
    CollectiveError, ConnectOptions, Group, GroupOptions, JobToken, RankEnv, connect, free_port,
    objects,
};
use megaburn_benches::{
    Failure,
    report::{Args, Report, Table},
    timing::{Times, millis},
};

/// The process of the rank that is killed finds its world here: the port and the number of ranks.
const KILLED: &str = "MEGABURN_BENCH_KILLED_RANK";
/// An inner rank of a tree: half of all ranks are below it.
const KILLED_RANK: usize = 1;
/// Each rank is a thread; the default stack of a thread would reserve gigabytes.
const STACK_BYTES: usize = 512 << 10;
const ROUNDS: usize = 10;

/// The flags of this measurement.
#[derive(Debug, Parser)]
struct Options {
    #[command(flatten)]
    common: Args,
    /// The numbers of ranks.
    #[arg(long, value_delimiter = ',', default_values_t = [64, 256, 1024])]
    ranks: Vec<usize>,
}

fn main() -> ExitCode {
    let result = match std::env::var(KILLED) {
        Ok(world) => wait_to_be_killed(&world),
        Err(_) => run(&Options::parse()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<(), Failure> {
    let about = "Ranks that are threads of one process and meet over TCP on this host. Rendezvous: \
                 from the first `connect` to the end of the last. Sockets, threads and memory: of \
                 the process when all ranks are connected and idle, divided by the ranks. Barrier \
                 and agreement (rank 0 gathers an object of each rank and sends one back): the \
                 median of ten, at rank 0. Abort: from the call of the last rank to the error at \
                 the slowest other rank, including the 100 ms that a rank leaves the others to \
                 finish. Kill: rank 1 is a process of its own that is killed; from the signal to \
                 the error at the slowest rank. Each error is checked to name the rank that failed.";
    let mut report = Report::new("control_plane", about);
    let head = [
        "ranks",
        "rendezvous s",
        "sockets a rank",
        "threads a rank",
        "KiB a rank",
        "barrier ms",
        "agreement ms",
        "abort ms",
        "kill ms",
    ];
    let mut table = Table::new("control plane over TCP", &head);
    for &ranks in &options.ranks {
        let idle = measure_world(ranks)?;
        let kill = measure_kill(ranks)?;
        table.row(vec![
            ranks.to_string(),
            format!("{:.2}", idle.rendezvous.as_secs_f64()),
            format!("{:.1}", idle.sockets),
            format!("{:.1}", idle.threads),
            format!("{:.0}", idle.kib),
            millis(idle.barrier),
            millis(idle.agreement),
            millis(idle.abort.as_secs_f64()),
            millis(kill.as_secs_f64()),
        ]);
    }
    report.table(&table);
    report.finish(&options.common)
}

/// What one world costs. Sockets, threads and memory are counted per rank.
struct Cost {
    rendezvous: Duration,
    sockets: f64,
    threads: f64,
    kib: f64,
    barrier: f64,
    agreement: f64,
    abort: Duration,
}

/// What all ranks of this process share.
struct Meeting {
    port: u16,
    ranks: usize,
    step: Barrier,
    ends: Mutex<Vec<Instant>>,
}

impl Meeting {
    /// A meeting of `here` rank threads and the main one.
    fn new(ranks: usize, here: usize) -> Result<Self, Failure> {
        Ok(Self {
            port: free_port()?,
            ranks,
            step: Barrier::new(here + 1),
            ends: Mutex::default(),
        })
    }

    fn end(&self) {
        let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        ends.push(Instant::now());
    }

    /// The time from `begin` to the last end since the last call.
    fn slowest_since(&self, begin: Instant) -> Duration {
        let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        let last = std::mem::take(&mut *ends).into_iter().max();
        last.map_or(Duration::ZERO, |last| last.saturating_duration_since(begin))
    }

    fn join(&self, rank: usize) -> Result<Group, CollectiveError> {
        join(rank, self.ranks, self.port)
    }

    /// Waits in barriers for the failure of `culprit`, and checks that the error names it.
    fn await_failure(&self, world: &Group, culprit: usize) -> Result<(), Failure> {
        let error = loop {
            if let Err(error) = world.barrier() {
                break error;
            }
        };
        self.end();
        let text = error.to_string();
        let named = [
            format!("lost rank {culprit}:"),
            format!("was ended by rank {culprit},"),
        ];
        match named.iter().any(|name| text.contains(name)) {
            true => Ok(()),
            false => Err(format!("rank {culprit} is not named: {text}").into()),
        }
    }
}

fn join(rank: usize, world_size: usize, master_port: u16) -> Result<Group, CollectiveError> {
    let env = RankEnv {
        rank,
        world_size,
        local_rank: rank,
        local_world_size: world_size,
        is_local_world_known: false,
        ranks_per_gpu: 1,
        master_addr: "127.0.0.1".into(),
        master_port,
        job_token: JobToken::secret("a token of the measurement"),
    };
    let group = GroupOptions {
        timeout: Duration::from_secs(120),
        ..GroupOptions::default()
    };
    connect(&ConnectOptions::new(env).with_group(group))
}

/// Runs `rank` on a thread for each rank and `main` on this one.
fn on_threads<T>(
    ranks: impl Iterator<Item = usize>,
    rank: impl Fn(usize) -> Result<(), Failure> + Sync,
    main: impl FnOnce() -> T,
) -> Result<T, Failure> {
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for number in ranks {
            let builder = thread::Builder::new().stack_size(STACK_BYTES);
            let rank = &rank;
            threads.push(builder.spawn_scoped(scope, move || rank(number))?);
        }
        let result = main();
        for thread in threads {
            thread.join().map_err(|_| "a rank panicked")??;
        }
        Ok(result)
    })
}

fn measure_world(ranks: usize) -> Result<Cost, Failure> {
    let meeting = Meeting::new(ranks, ranks)?;
    let agreements = Mutex::new([f64::NAN; 2]);
    let before = Usage::now()?;
    let rank = |rank: usize| {
        meeting.step.wait();
        let world = meeting.join(rank);
        meeting.end();
        // All arrive here, also if some could not connect.
        meeting.step.wait();
        meeting.step.wait();
        let world = world?;
        let measured = [
            rounds(|| world.barrier())?,
            rounds(|| {
                let all = objects::gather(&world, &rank)?;
                objects::broadcast(&world, &all.len()).map(drop)
            })?,
        ];
        if rank == 0 {
            *agreements.lock().unwrap_or_else(PoisonError::into_inner) = measured;
        }
        meeting.step.wait();
        if rank + 1 == ranks {
            world.abort("the measurement ends it");
            return Ok(());
        }
        meeting.await_failure(&world, ranks - 1)
    };
    let main = || {
        meeting.step.wait();
        let begin = Instant::now();
        meeting.step.wait();
        let rendezvous = meeting.slowest_since(begin);
        let usage = Usage::now();
        meeting.step.wait();
        meeting.step.wait();
        (rendezvous, usage, Instant::now())
    };
    let (rendezvous, usage, aborted) = on_threads(0..ranks, rank, main)?;
    let usage = usage?;
    let [barrier, agreement] = agreements
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    let share = |now: usize, before: usize| now.saturating_sub(before) as f64 / ranks as f64;
    Ok(Cost {
        rendezvous,
        sockets: share(usage.sockets, before.sockets),
        threads: share(usage.threads, before.threads),
        kib: share(usage.kib, before.kib),
        barrier,
        agreement,
        abort: meeting.slowest_since(aborted),
    })
}

fn rounds(mut work: impl FnMut() -> Result<(), CollectiveError>) -> Result<f64, CollectiveError> {
    let mut times = Times::default();
    for _ in 0..ROUNDS {
        let start = Instant::now();
        work()?;
        times.push(start.elapsed());
    }
    Ok(times.median())
}

/// The time from the end of a process with one rank to the errors of all others.
fn measure_kill(ranks: usize) -> Result<Duration, Failure> {
    let meeting = Meeting::new(ranks, ranks - 1)?;
    let mut killed = Killed::start(&meeting)?;
    let rank = |rank: usize| {
        let world = meeting.join(rank);
        meeting.step.wait();
        meeting.await_failure(&world?, KILLED_RANK)
    };
    let main = || {
        meeting.step.wait();
        // The others wait in the barrier by now.
        thread::sleep(Duration::from_millis(500));
        let begin = Instant::now();
        killed.end().map(|()| begin)
    };
    let others = (0..ranks).filter(|rank| *rank != KILLED_RANK);
    let begin = on_threads(others, rank, main)??;
    Ok(meeting.slowest_since(begin))
}

/// The process of the rank that is killed.
struct Killed(Child);

impl Killed {
    fn start(meeting: &Meeting) -> Result<Self, Failure> {
        let world = format!("{} {}", meeting.port, meeting.ranks);
        let child = Command::new(std::env::current_exe()?)
            .env(KILLED, world)
            .stdin(Stdio::null())
            .spawn()?;
        Ok(Self(child))
    }

    fn end(&mut self) -> std::io::Result<()> {
        self.0.kill()?;
        self.0.wait().map(drop)
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

fn wait_to_be_killed(world: &str) -> Result<(), Failure> {
    let (port, ranks) = world
        .split_once(' ')
        .ok_or("a port and a number of ranks")?;
    let _world = join(KILLED_RANK, ranks.parse()?, port.parse()?)?;
    thread::sleep(Duration::from_secs(600));
    Err("it was not killed".into())
}

/// What this process uses.
struct Usage {
    sockets: usize,
    threads: usize,
    kib: usize,
}

impl Usage {
    fn now() -> Result<Self, Failure> {
        let links = fs::read_dir("/proc/self/fd")?.flatten();
        let links = links.filter_map(|link| fs::read_link(link.path()).ok());
        let sockets = links.filter(|link| link.to_string_lossy().starts_with("socket:"));
        let status = fs::read_to_string("/proc/self/status")?;
        let number = |key: &str| -> Result<usize, Failure> {
            let line = status.lines().find_map(|line| line.strip_prefix(key));
            let number = line.and_then(|line| line.split_whitespace().next());
            Ok(number
                .ok_or(format!("/proc/self/status has no {key}"))?
                .parse()?)
        };
        Ok(Self {
            sockets: sockets.count(),
            threads: number("Threads:")?,
            kib: number("VmRSS:")?,
        })
    }
}
