//! SIGKILL to all processes, to one rank, or to the launcher.

use std::{thread, time::Duration};

use nix::sys::signal::Signal;

use crate::{
    case::{Case, ENDLESS, ENDS, world_size},
    check,
    job::{Job, binary, megaburn, plain, processes_of},
};

/// All processes die at a random moment, including start-up.
pub(super) fn all(case: &Case) -> Result<(), String> {
    let mut job = match case.below(4) {
        0 => case.start(case.train(case.layout, ENDLESS, &[])),
        _ => case.start_and_wait(1 + case.below(9), &[])?,
    };
    thread::sleep(Duration::from_millis(case.below(100)));
    let saved = check::last_checkpoint(&case.run());
    job.signal_all(case.dir(), Signal::SIGKILL);
    job.wait(ENDS)?;
    if check::last_checkpoint(&case.run()) < saved {
        return Err(format!("the committed checkpoint of step {saved} is gone"));
    }
    case.recover()
}

/// All processes die four times, each time under another layout.
pub(super) fn storm(case: &Case) -> Result<(), String> {
    for _ in 0..4 {
        let layout = case.any_layout();
        let mut job = case.start(case.train(layout, ENDLESS, &["train.checkpoint_interval=1"]));
        let after = check::last_step(&case.run()) + 1;
        case.wait_for_step(&mut job, after)?;
        thread::sleep(Duration::from_millis(case.below(80)));
        job.signal_all(case.dir(), Signal::SIGKILL);
        job.wait(ENDS)?;
    }
    case.recover_roughly(case.any_layout())
}

/// One rank of several processes dies: the job ends in time and reports it.
pub(super) fn rank(case: &Case) -> Result<(), String> {
    let args = case.train_args(case.layout, ENDLESS, &[]);
    let mut job = case.start(case.launch(case.layout, &args));
    case.wait_for_step(&mut job, 1 + case.below(5))?;
    let rank = case.below(world_size(case.layout) as u64) as usize;
    let victim = rank_process(case, job.pid(), rank)?;
    let signal = case.one_of(&[Signal::SIGKILL, Signal::SIGABRT]);
    kill(victim, signal);
    let ended = job.wait(ENDS)?;
    case.took(ended.seconds);
    ended
        .expect(&[128 + signal as i32])?
        .says(&[&format!("rank {rank} was killed by {signal}")])?;
    check::no_processes(case.dir(), Duration::from_secs(2))?;
    case.recover()
}

/// The launcher dies: its ranks do not continue training.
pub(super) fn launcher(case: &Case) -> Result<(), String> {
    let args = case.train_args(case.layout, ENDLESS, &[]);
    let mut job = case.start(case.launch(case.layout, &args));
    case.wait_for_step(&mut job, 1 + case.below(5))?;
    job.signal(Signal::SIGKILL);
    job.wait(ENDS)?;
    check::no_processes(case.dir(), Duration::from_secs(2))?;
    case.recover()
}

/// Starts ranks under a shell that stays between the launcher and the program.
pub(super) fn behind_a_shell(case: &Case, script: &str, sets: &[&str]) -> Job {
    let mut command = vec!["launch".to_string(), "--nproc".into()];
    command.push(world_size(case.layout).to_string());
    command.extend(["--", "sh", "-c", script, "sh"].map(String::from));
    command.push(binary().display().to_string());
    command.extend(case.train_args(case.layout, ENDLESS, sets));
    case.start(megaburn(command))
}

/// A launcher dies whose ranks run under shells.
pub(super) fn wrapper(case: &Case) -> Result<(), String> {
    let mut job = behind_a_shell(case, "\"$@\"; echo ended", &[]);
    case.wait_for_step(&mut job, 1 + case.below(5))?;
    job.signal(Signal::SIGKILL);
    job.wait(ENDS)?;
    check::no_processes(case.dir(), Duration::from_secs(2))?;
    case.recover()
}

/// The process of a rank that a launcher started.
pub(super) fn rank_process(case: &Case, launcher: i32, rank: usize) -> Result<i32, String> {
    let is_rank = |pid: &i32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let mut variables = environment.split(|byte| *byte == 0);
        *pid != launcher && variables.any(|variable| variable == format!("RANK={rank}").as_bytes())
    };
    let found = processes_of(case.dir()).into_iter().find(is_rank);
    found.ok_or_else(|| format!("no process has RANK={rank}"))
}

pub(super) fn kill(pid: i32, signal: Signal) {
    let _ = plain("kill", [format!("-{}", signal as i32), pid.to_string()]).status();
}
