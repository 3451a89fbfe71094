//! Faults in a run that is started again by its launchers: it must come back and lose nothing.

use std::{fs, thread, time::Duration};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    case::Case,
    memory,
    progress::Progress,
    report::Recovery,
    restarted::{INTERVAL, JobShape, Restarted},
};

/// The default of `MEGABURN_FAULTS_PER_RUN`.
const FAULTS: u64 = 3;
/// After an attempt of this length the launcher restarts at once. Faults in quicker succession would
/// measure its pauses.
const QUIET: Duration = Duration::from_secs(10);
/// Some are in memory that is not used any more.
const MOST_FLIPS: usize = 20;
/// How ranks report what a flipped bit changed.
const FOUND: [&str; 2] = ["is not what step", "have different copies of"];
/// A run must do a new step within this many seconds after a fault is over.
const BACK: f64 = 30.0;

/// What can go wrong in a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    KillRank,
    AbortRank,
    StopRank,
    PauseRank,
    KillLauncher,
    PauseLauncher,
    KillHost,
    ShortPartition,
    LongPartition,
    SlowLink,
    FullDisk,
    Nan,
    WrongShape,
    BitFlip,
    ClockJump,
}

impl Fault {
    const ALL: [Self; 15] = [
        Self::KillRank,
        Self::AbortRank,
        Self::StopRank,
        Self::PauseRank,
        Self::KillLauncher,
        Self::PauseLauncher,
        Self::KillHost,
        Self::ShortPartition,
        Self::LongPartition,
        Self::SlowLink,
        Self::FullDisk,
        Self::Nan,
        Self::WrongShape,
        Self::BitFlip,
        Self::ClockJump,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::KillRank => "a rank is killed",
            Self::AbortRank => "a rank aborts",
            Self::StopRank => "a rank hangs",
            Self::PauseRank => "a rank is suspended for 1 s",
            Self::KillLauncher => "a launcher is killed, and started after 1 s",
            Self::PauseLauncher => "a launcher is suspended for 3 s",
            Self::KillHost => "a host is lost, and comes back after 1 s",
            Self::ShortPartition => "a host is cut off for 2 s",
            Self::LongPartition => "a host is cut off for 14 s",
            Self::SlowLink => "a host sends 200 kbit/s for 3 s",
            Self::FullDisk => "the disk is full for 2 s",
            Self::Nan => "a loss is NaN once",
            Self::WrongShape => "a rank computes fewer tokens once",
            Self::BitFlip => "a bit flips in the memory of a rank",
            Self::ClockJump => "the clock of a host jumps by up to 3 hours",
        }
    }

    fn is_possible(self, run: &Restarted<'_>) -> bool {
        match self {
            Self::ShortPartition | Self::LongPartition | Self::SlowLink => run.network.is_some(),
            Self::WrongShape => run.has_tensor_parallel(),
            _ => true,
        }
    }

    /// Whether the ranks must be started again, must not, or may.
    fn restarts(self) -> Option<bool> {
        match self {
            Self::KillRank
            | Self::AbortRank
            | Self::StopRank
            | Self::KillLauncher
            | Self::KillHost
            | Self::LongPartition
            | Self::WrongShape => Some(true),
            Self::PauseRank | Self::PauseLauncher | Self::Nan | Self::ClockJump => Some(false),
            // The bit may be in memory that nothing reads again.
            Self::BitFlip | Self::ShortPartition | Self::SlowLink | Self::FullDisk => None,
        }
    }

    /// Breaks the run, and mends what does not mend itself.
    pub(crate) fn happen(self, run: &mut Restarted<'_>) -> Result<(), String> {
        let case = run.case;
        let rank = run.some_rank()?;
        let signal = |signal| {
            let pid = Pid::from_raw(run.rank(rank)?);
            kill(pid, signal).map_err(|error| format!("rank {rank} has ended: {error}"))
        };
        match self {
            Self::KillRank => signal(Signal::SIGKILL)?,
            Self::AbortRank => signal(Signal::SIGABRT)?,
            Self::StopRank => signal(Signal::SIGSTOP)?,
            Self::PauseRank => {
                signal(Signal::SIGSTOP)?;
                seconds(1);
                signal(Signal::SIGCONT)?;
            }
            Self::KillLauncher => {
                let node = run.node_of(rank)?;
                run.signal_launcher(node, Signal::SIGKILL);
                seconds(1);
                run.start_again(node)?;
            }
            Self::PauseLauncher => {
                let node = run.node_of(rank)?;
                run.signal_launcher(node, Signal::SIGSTOP);
                seconds(3);
                run.signal_launcher(node, Signal::SIGCONT);
            }
            Self::KillHost => {
                let node = run.node_of(rank)?;
                run.kill_host(node);
                seconds(1);
                run.start_again(node)?;
            }
            Self::ShortPartition => cut_off(run, rank, 2)?,
            Self::LongPartition => cut_off(run, rank, 14)?,
            Self::SlowLink => {
                let node = run.node_of(rank)?;
                let network = run.network.as_ref().ok_or("no network")?;
                network.set_limit(node, Some(200))?;
                seconds(3);
                network.set_limit(node, None)?;
            }
            Self::FullDisk => {
                let full = run.fault_file("full");
                write(&full, "")?;
                seconds(2);
                fs::remove_file(full).map_err(|error| error.to_string())?;
            }
            Self::Nan => write(&run.fault_file("nan"), "")?,
            Self::WrongShape => write(&run.fault_file(&format!("shape-{rank}")), "")?,
            Self::BitFlip => memory::flip_bit(run)?,
            Self::ClockJump => {
                let node = run.node_of(rank)?;
                let jump = case.below(6 * 3600) as i64 - 3 * 3600;
                write(&run.fault_file(&format!("clock-{node}")), &jump.to_string())?;
            }
        }
        Ok(())
    }
}

fn cut_off(run: &Restarted<'_>, rank: usize, time: u64) -> Result<(), String> {
    let node = run.node_of(rank)?;
    let network = run.network.as_ref().ok_or("no network")?;
    network.set_connected(node, false)?;
    seconds(time);
    network.set_connected(node, true)
}

fn seconds(seconds: u64) {
    thread::sleep(Duration::from_secs(seconds));
}

fn write(path: &std::path::Path, text: &str) -> Result<(), String> {
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

/// Whether cases are drawn for a campaign. Other runs of the tests may share slow cores.
fn is_campaign() -> bool {
    std::env::var_os("MEGABURN_FAULT_CASES").is_some()
}

/// Whether a rank still has to compute a loss that is NaN.
fn has_open_nan(run: &Restarted<'_>) -> bool {
    run.fault_file("nan").exists()
}

/// Several faults, one after the other, in one run.
pub(super) fn several(case: &Case) -> Result<(), String> {
    let number = std::env::var("MEGABURN_FAULTS_PER_RUN").ok();
    let number = number.and_then(|text| text.parse().ok()).unwrap_or(FAULTS);
    let mut run = Restarted::start(case, JobShape::random(case))?;
    let name = run.describe();
    let mut done = Vec::new();
    let result = (0..number).try_for_each(|_| {
        let fault = loop {
            let fault = case.one_of(&Fault::ALL);
            if fault.is_possible(&run) {
                break fault;
            }
        };
        done.push(fault);
        one(case, &mut run, fault)
    });
    result
        .and_then(|()| run.finish())
        .map_err(|what| format!("{name}, {done:?}: {what}"))
}

/// Bits in the memory of ranks flip until the ranks were started again because of one.
pub(super) fn bit_flip(case: &Case) -> Result<(), String> {
    let mut run = Restarted::start(case, JobShape::random(case))?;
    let name = run.describe();
    let starts = run.progress().starts.len();
    for _ in 0..MOST_FLIPS {
        one(case, &mut run, Fault::BitFlip).map_err(|what| format!("{name}: {what}"))?;
        if run.progress().starts.len() > starts {
            if !run.has_printed(&FOUND) {
                return Err(format!("{name}: nothing was said of the flipped bit"));
            }
            return run.finish().map_err(|what| format!("{name}: {what}"));
        }
    }
    Err(format!(
        "{name}: none of {MOST_FLIPS} flipped bits was found"
    ))
}

fn one(case: &Case, run: &mut Restarted<'_>, fault: Fault) -> Result<(), String> {
    thread::sleep(Duration::from_millis(case.below(400)));
    let before = run.progress();
    fault.happen(run)?;
    // What ranks still do before they notice the fault are no new steps.
    let mended = run.progress();
    let is_back = |now: &Progress| {
        let has_restarted = now.starts.len() > before.starts.len() && now.step > before.step;
        match fault.restarts() {
            Some(true) => has_restarted,
            Some(false) | None => has_restarted || now.step > mended.step + INTERVAL,
        }
    };
    let back = run.wait(&format!("a new step after {fault:?}"), is_back)?;
    if is_campaign() && back > BACK {
        return Err(format!("the run was back after {back:.1} s only"));
    }
    if run.is_elastic() {
        run.wait_for_all_hosts()?;
    }
    if fault.restarts() != Some(true) {
        // A restart that is still to come would come before these.
        let from = run.progress().step;
        run.wait("ten more steps", |now| now.step >= from + 10)?;
    }
    if has_open_nan(run) {
        return Err("no rank has computed the NaN".to_string());
    }
    let after = run.progress();
    let new = &after.starts[before.starts.len()..];
    let restarts = new.len() as u64;
    if restarts > 0 && fault.restarts() == Some(false) {
        return Err("the ranks were started again".to_string());
    }
    let from_step = new.iter().map(|start| start.from_step).min();
    let lost = from_step.map_or(0, |step| before.step.saturating_sub(step));
    // A save may be running, and steps are done between the look at the metrics and the fault.
    let most = if case.is_async {
        2 * INTERVAL
    } else {
        INTERVAL
    };
    if lost > most {
        return Err(format!(
            "{lost} steps were lost: from step {} back to one of {new:?}",
            before.step
        ));
    }
    case.recovered(Recovery {
        fault: fault.name(),
        restarts,
        seconds: back,
        lost,
    });
    if restarts > 0 {
        thread::sleep(QUIET);
    }
    Ok(())
}
