//! SIGSTOP: hung ranks, hung saves, suspended jobs.

use std::{fs::OpenOptions, thread, time::Duration};

use nix::{
    fcntl::{FcntlArg, fcntl},
    sys::{signal::Signal, stat::Mode},
    unistd::mkfifo,
};

use super::kills::{kill, rank_process};
use crate::{
    case::{Case, ENDLESS, ENDS, STEPS, TIMEOUT, world_size},
    check,
    job::{Job, PATIENCE},
    shim::FileFault,
};

/// A rank hangs: the others end in time, and the launcher ends the hung rank.
pub(super) fn rank(case: &Case) -> Result<(), String> {
    let args = case.train_args(case.layout, ENDLESS, &[]);
    let mut job = case.start(case.launch(case.layout, &args));
    case.wait_for_step(&mut job, 1 + case.below(5))?;
    let rank = case.below(world_size(case.layout) as u64) as usize;
    kill(rank_process(case, job.pid(), rank)?, Signal::SIGSTOP);
    // The launcher gives the hung rank 3 s to end.
    let ended = job.wait(ENDS + Duration::from_secs(3))?;
    case.took(ended.seconds);
    ended
        .expect(&[4])?
        .says(&[&format!("waiting for rank {rank}")])?;
    check::no_processes(case.dir(), Duration::from_secs(2))?;
    case.recover()
}

/// A rank is stopped before it has joined the others.
pub(super) fn before_joining(case: &Case) -> Result<(), String> {
    let rank = case.below(world_size(case.layout) as u64);
    let script = format!("[ $RANK = {rank} ] && kill -STOP $$; exec \"$@\"");
    let mut job = super::kills::behind_a_shell(case, &script, &[]);
    let ended = job.wait(ENDS + Duration::from_secs(3))?;
    case.took(ended.seconds);
    let named = [
        format!("ranks [{rank}]"),
        "rank 0 cannot be reached in time".into(),
    ];
    ended
        .expect(&[4])?
        .says(&[&named[usize::from(rank == 0)]])?;
    check::no_processes(case.dir(), Duration::from_secs(2))?;
    case.recover()
}

/// A rank that is stopped for less than the limit continues, and so does the run.
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

/// The full job is suspended for longer than the limit: it continues when resumed.
pub(super) fn everything(case: &Case) -> Result<(), String> {
    let sets = ["train.timeout_seconds=1.0"];
    let mut job = case.start_and_wait(1 + case.below(5), &sets)?;
    job.signal_all(case.dir(), Signal::SIGSTOP);
    thread::sleep(Duration::from_secs_f64(1.6));
    job.signal_all(case.dir(), Signal::SIGCONT);
    let step = check::last_step(&case.run());
    case.wait_for_step(&mut job, step + 5)?;
    job.signal(Signal::SIGTERM);
    job.wait(ENDS)?.expect(&[0])?;
    case.recover()
}

/// The reader of the run's output pauses for longer than the limit of a collective, as with Ctrl-S:
/// the run continues.
pub(super) fn reader(case: &Case) -> Result<(), String> {
    let fifo = case.path("fifo");
    let said = case.path("said");
    mkfifo(&fifo, Mode::S_IRWXU).map_err(|error| error.to_string())?;
    // Open the fifo for reading and writing, so that opening does not block; it holds about forty
    // lines.
    let open = || {
        OpenOptions::new()
            .read(true)
            .write(true)
            .open(&fifo)
            .unwrap()
    };
    let held = open();
    let mut command = case.train(case.layout, ENDLESS, &["train.timeout_seconds=1.0"]);
    fcntl(&held, FcntlArg::F_SETPIPE_SZ(4096)).map_err(|error| error.to_string())?;
    command.stdout(open()).stderr(open());
    let mut job = Job::start_with_output(command, said);
    case.wait_for_step(&mut job, STEPS)?;
    thread::sleep(Duration::from_secs_f64(TIMEOUT));
    let step = check::last_step(&case.run());
    case.wait_for_step(&mut job, step + 5)?;
    job.signal(Signal::SIGTERM);
    // At exit the run waits a moment for a reader of the remaining output.
    job.wait(ENDS + Duration::from_secs(10))?.expect(&[0])?;
    drop(held);
    case.recover()
}

/// A rank hangs in the middle of a save.
pub(super) fn inside_a_save(case: &Case) -> Result<(), String> {
    let args = case.train_args(case.layout, ENDLESS, &["train.save_timeout_seconds=3.0"]);
    let mut command = case.launch(case.layout, &args);
    FileFault::Stops.add(&mut command, case, 20 + case.below(40), Some(0));
    let mut job = case.start(command);
    let ended = case.wait_moving(&mut job)?;
    ended.expect(&[4])?.says(&[
        "waiting for rank 0",
        "did not join",
        "rank 0 has been silent",
    ])?;
    check::no_processes(case.dir(), Duration::from_secs(2))?;
    case.recover()
}
