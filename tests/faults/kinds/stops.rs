//! SIGSTOP: hung ranks, hung saves, suspended jobs.

use std::{thread, time::Duration};

use nix::sys::signal::Signal;

use super::kills::{kill, rank_process};
use crate::{
    case::{Case, ENDLESS, GRACE, STEPS, TIMEOUT, world_size},
    check,
    job::PATIENCE,
    shim::FileFault,
};

const LIMIT: Duration = Duration::from_millis(((TIMEOUT + GRACE) * 1000.0) as u64);

/// A rank hangs: the others end in time, and the launcher ends the hung one.
pub(super) fn rank(case: &Case) -> Result<(), String> {
    let args = case.train_args(case.layout, ENDLESS, &[]);
    let mut job = case.start(case.launch(case.layout, &args));
    case.wait_for_step(&mut job, 1 + case.below(5))?;
    let rank = case.below(world_size(case.layout) as u64) as usize;
    kill(rank_process(case, job.pid(), rank)?, Signal::SIGSTOP);
    let ended = job.wait(LIMIT + Duration::from_secs(3))?;
    case.took(ended.seconds);
    ended.expect(&[4])?;
    check::no_processes(case.dir(), Duration::from_secs(2))?;
    case.recover()
}

/// A rank that is stopped for less than the limit goes on, and so does the run.
pub(super) fn rank_for_a_moment(case: &Case) -> Result<(), String> {
    let args = case.train_args(case.layout, STEPS, &[]);
    let mut job = case.start(case.launch(case.layout, &args));
    case.wait_for_step(&mut job, 1 + case.below(5))?;
    let rank = case.below(world_size(case.layout) as u64) as usize;
    // The run may be over already, on a fast machine.
    if let Ok(victim) = rank_process(case, job.pid(), rank) {
        kill(victim, Signal::SIGSTOP);
        thread::sleep(Duration::from_secs_f64(TIMEOUT / 2.0));
        kill(victim, Signal::SIGCONT);
    }
    job.wait(PATIENCE)?.expect(&[0])?;
    case.recover()
}

/// The whole job is suspended for longer than the limit and continued: it goes on.
pub(super) fn everything(case: &Case) -> Result<(), String> {
    let sets = ["train.timeout_seconds=1.0"];
    let mut job = case.start_and_wait(1 + case.below(5), &sets)?;
    job.signal_all(case.dir(), Signal::SIGSTOP);
    thread::sleep(Duration::from_secs_f64(1.6));
    job.signal_all(case.dir(), Signal::SIGCONT);
    let step = check::last_step(&case.run());
    case.wait_for_step(&mut job, step + 5)?;
    job.signal(Signal::SIGTERM);
    job.wait(PATIENCE)?.expect(&[0])?;
    case.recover()
}

/// A rank hangs in the middle of a save.
pub(super) fn inside_a_save(case: &Case) -> Result<(), String> {
    let args = case.train_args(case.layout, ENDLESS, &["train.save_timeout_seconds=3.0"]);
    let mut command = case.launch(case.layout, &args);
    FileFault::Stops.add(&mut command, case, 20 + case.below(40), Some(0));
    let mut job = case.start(command);
    let ended = job.wait(PATIENCE)?;
    case.took(ended.seconds);
    if ended.code == 0 {
        return Err("exit code 0 though a rank hung".to_string());
    }
    check::no_processes(case.dir(), Duration::from_secs(2))?;
    case.recover()
}
