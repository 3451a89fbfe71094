//! Signals that ask a run to stop.

use std::{fs, thread, time::Duration};

use nix::sys::signal::Signal;

use super::kills::{kill, rank_process};
use crate::{
    case::{Case, ENDLESS, ENDS, world_size},
    check,
    job::Job,
};

/// A signal that asks a run to stop. SIGHUP is not used if this campaign was started by `nohup`,
/// because its jobs then ignore it too.
fn ask(case: &Case) -> Signal {
    let asked = case.one_of(&[
        Signal::SIGTERM,
        Signal::SIGINT,
        Signal::SIGHUP,
        Signal::SIGUSR1,
    ]);
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0);
    match asked {
        Signal::SIGHUP if ignored & 1 == 1 => Signal::SIGTERM,
        asked => asked,
    }
}

/// The run saves its last step and ends with 0.
pub(super) fn stop(case: &Case) -> Result<(), String> {
    let mut job = case.start_and_wait(1 + case.below(9), &["train.checkpoint_interval=0"])?;
    let signal = ask(case);
    if case.launched && case.below(3) == 0 {
        let rank = case.below(world_size(case.layout) as u64) as usize;
        kill(rank_process(case, job.pid(), rank)?, signal);
    } else {
        job.signal(signal)
    }
    saved_and_ended(case, &mut job, 0)?;
    case.recover()
}

/// Two signals within a second are one request.
pub(super) fn twice(case: &Case) -> Result<(), String> {
    let mut job = case.start_and_wait(1 + case.below(5), &["train.checkpoint_interval=0"])?;
    let signal = ask(case);
    job.signal(signal);
    thread::sleep(Duration::from_millis(case.below(400)));
    job.signal(case.one_of(&[signal, Signal::SIGTERM]));
    saved_and_ended(case, &mut job, 0)?;
    case.recover()
}

/// The shell that the launcher started dies of the signal, but the program that the shell started
/// still saves.
pub(super) fn behind_a_shell(case: &Case) -> Result<(), String> {
    let sets = ["train.checkpoint_interval=0"];
    let mut job = super::kills::behind_a_shell(case, "\"$@\"; echo ended", &sets);
    case.wait_for_step(&mut job, 1 + case.below(9))?;
    job.signal(Signal::SIGTERM);
    saved_and_ended(case, &mut job, 128 + Signal::SIGTERM as i32)?;
    case.recover()
}

/// A host never arrives: the ranks that wait for it end at once.
pub(super) fn while_waiting(case: &Case) -> Result<(), String> {
    let port = free_port();
    let args = case.train_args("dp4", ENDLESS, &[]);
    let mut command = case.launch("dp2", &args);
    // Options are placed before the program: `launch --nproc 2 -- PROGRAM`.
    let all: Vec<_> = command.get_args().map(|arg| arg.to_owned()).collect();
    let hosts = [
        "--nnodes",
        "2",
        "--node-rank",
        "0",
        "--master-addr",
        "127.0.0.1",
    ];
    command = crate::job::megaburn(
        all[..3]
            .iter()
            .cloned()
            .chain(hosts.map(Into::into))
            .chain(["--master-port".into(), port.to_string().into()])
            .chain(all[3..].iter().cloned()),
    );
    let mut job = case.start(command);
    thread::sleep(Duration::from_millis(300 + case.below(700)));
    let signal = case.one_of(&[Signal::SIGTERM, Signal::SIGINT]);
    job.signal(signal);
    let ended = job.wait(Duration::from_secs(5))?;
    case.took(ended.seconds);
    ended.expect(&[128 + signal as i32])?;
    check::no_processes(case.dir(), Duration::from_secs(2))
}

/// The process dies during the save that a request to stop started.
pub(super) fn kill_while_saving(case: &Case) -> Result<(), String> {
    let mut job = case.start_and_wait(4 + case.below(5), &[])?;
    let saved = check::last_checkpoint(&case.run());
    job.signal(Signal::SIGTERM);
    thread::sleep(Duration::from_millis(case.below(60)));
    job.signal_all(case.dir(), Signal::SIGKILL);
    job.wait(ENDS)?;
    if check::last_checkpoint(&case.run()) < saved {
        return Err(format!("the committed checkpoint of step {saved} is gone"));
    }
    case.recover()
}

fn saved_and_ended(case: &Case, job: &mut Job, code: i32) -> Result<(), String> {
    let ended = job.wait(ENDS)?;
    case.took(ended.seconds);
    ended.expect(&[code])?;
    let step = check::last_step(&case.run());
    let saved = check::last_checkpoint(&case.run());
    if saved != step {
        return Err(format!("step {step} was done, but step {saved} was saved"));
    }
    check::no_processes(case.dir(), Duration::from_secs(2))
}

/// A port without a listener.
pub(crate) fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}
