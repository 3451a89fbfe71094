//! File operations that fail, are slow, or are the last thing that a process does.

use std::{fs::OpenOptions, process::Command, time::Duration};

use nix::{errno::Errno, sys::signal::Signal};

use crate::{
    case::{Case, ENDLESS, STEPS},
    check,
    job::{Ended, Job, PATIENCE, megaburn, plain},
    shim::FileFault,
};

/// A process dies before, in or after one file operation.
pub(super) fn killed(case: &Case) -> Result<(), String> {
    let when = case.one_of(&["before", "after", "torn"]);
    let mut command = case.train(case.layout, STEPS, &["train.checkpoint_interval=1"]);
    FileFault::Kill(when).add(&mut command, case, 1 + case.below(150), None);
    case.wait_moving(&mut case.start(command))?;
    case.recover()
}

/// One file operation fails: the run continues, or ends with an error that names the file and the
/// reason.
pub(super) fn fails(case: &Case) -> Result<(), String> {
    let errno = case.one_of(&[Errno::EIO, Errno::ENOSPC, Errno::EDQUOT, Errno::EACCES]);
    let mut command = case.train(case.layout, STEPS, &["train.checkpoint_interval=1"]);
    FileFault::Fails(errno as i32).add(&mut command, case, 1 + case.below(150), None);
    let ended = case.wait_moving(&mut case.start(command))?;
    failed_for(case, ended, errno)?;
    case.recover()
}

/// Checks that the run finished, or failed with a message that names the file and the reason. The
/// exit code of a failure is 1, or 2 before the run had its folder.
fn failed_for(case: &Case, ended: Ended, errno: Errno) -> Result<(), String> {
    let mut ended = ended.expect(&[0, 1, 2])?;
    if ended.code == 0 {
        return Ok(());
    }
    if ended.code == 2 {
        // The second message is of the folder of checkpoints, which is made in the run's folder.
        ended = ended.says(&["cannot be the run's folder", "cannot sync the folder"])?;
    }
    let ended = ended.says(&[&case.run().display().to_string()])?;
    ended.says(&[&format!("os error {}", errno as i32)])?;
    Ok(())
}

/// The disk is full from some operation on, until space is freed.
pub(super) fn disk_full(case: &Case) -> Result<(), String> {
    case.start(case.train(case.layout, 4, &[]))
        .wait(PATIENCE)?
        .expect(&[0])?;
    let mut command = case.train(case.layout, STEPS, &["train.checkpoint_interval=1"]);
    FileFault::DiskFull.add(&mut command, case, 1 + case.below(150), None);
    let saved = check::last_checkpoint(&case.run());
    let ended = case.wait_moving(&mut case.start(command))?;
    failed_for(case, ended, Errno::ENOSPC)?;
    if check::last_checkpoint(&case.run()) < saved {
        return Err(format!("the committed checkpoint of step {saved} is gone"));
    }
    case.recover()
}

/// A sync takes longer than the limit of a collective: the other ranks wait for it.
pub(super) fn slow_disk(case: &Case) -> Result<(), String> {
    let sets = ["train.timeout_seconds=1.0", "train.checkpoint_interval=5"];
    let mut command = case.train(case.layout, STEPS, &sets);
    FileFault::SlowSync(1800).add(
        &mut command,
        case,
        1 + case.below(16),
        case.launched.then_some(0),
    );
    case.start(command).wait(PATIENCE)?.expect(&[0])?;
    case.recover()
}

/// Exceeding `ulimit -f` is an error that names the file, not a signal.
pub(super) fn size_limit(case: &Case) -> Result<(), String> {
    let args = case.train_args(case.layout, STEPS, &["train.checkpoint_interval=2"]);
    let limited = format!("ulimit -f {}; exec \"$@\"", 8 + case.below(60));
    let shell = ["-c".to_string(), limited, "sh".into()];
    let command: Command = if case.launched {
        let launch = case.launch(case.layout, &args);
        let launch = launch
            .get_args()
            .map(|arg| arg.to_string_lossy().into_owned());
        let all = [crate::job::binary().display().to_string()]
            .into_iter()
            .chain(launch);
        plain("bash", shell.into_iter().chain(all))
    } else {
        let all = [crate::job::binary().display().to_string()]
            .into_iter()
            .chain(args);
        plain("bash", shell.into_iter().chain(all))
    };
    let ended = case.start(command).wait(PATIENCE)?.expect(&[0, 1, 2])?;
    if ended.code != 0 {
        ended.says(&[&case.run().display().to_string()])?;
    }
    case.recover()
}

/// Standard output and error cannot be written: the run continues, with unchanged exit codes.
pub(super) fn full_output(case: &Case) -> Result<(), String> {
    let full = || OpenOptions::new().write(true).open("/dev/full").unwrap();
    let start = |mut command: Command| {
        command.stdout(full()).stderr(full());
        Job::start_with_output(command, case.path("nothing"))
    };
    start(case.train(case.layout, STEPS, &[]))
        .wait(PATIENCE)?
        .expect(&[0])?;
    let bad = case.train(case.layout, ENDLESS, &["model.layers=three"]);
    start(bad).wait(PATIENCE)?.expect(&[2])?;
    let mut job = start(case.train(case.layout, ENDLESS, &[]));
    case.wait_for_step(&mut job, STEPS + 1)?;
    job.signal(Signal::SIGTERM);
    job.wait(PATIENCE)?.expect(&[0])?;
    let generate = [
        "generate",
        &case.run().display().to_string(),
        "--prompt",
        "a",
    ]
    .map(String::from);
    start(megaburn(generate))
        .wait(Duration::from_secs(30))?
        .expect(&[0, 1])?;
    case.recover()
}
