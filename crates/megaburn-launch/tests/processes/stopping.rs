//! Runs that are asked to stop, that stop by themselves, or that are suspended.

use std::time::{Duration, Instant};

use libtest_mimic::Failed;
use nix::sys::signal::Signal;

use super::{
    PROMISED,
    run::{self, Run},
};

/// The signal kills the shell at once, but the program takes 3.5 s to save.
pub(crate) fn behind_a_shell() -> Result<(), Failed> {
    let this = std::env::current_exe()?;
    let script = [
        "sh",
        "-c",
        "\"$@\"; echo done",
        "sh",
        this.to_str().unwrap(),
        "rank",
        "slow",
    ];
    let mut run = Run::launch(2, &script, &[]);
    let pids = run.pids();
    run.signal(Signal::SIGTERM);
    let end = run.end(PROMISED);
    assert_eq!(end.code, Some(128 + 15), "it is the shell's: {end:?}");
    for line in ["saved", "[rank 1] saved"] {
        assert!(
            end.out.iter().any(|out| out == line),
            "{line:?} is missing: {end:?}"
        );
    }
    run::assert_gone(&pids);
    Ok(())
}

/// As with `train.exit_after_minutes` and `train.stopped_exit_code`: there is no signal, and a GPU
/// takes long to shut down.
pub(crate) fn with_one_code() -> Result<(), Failed> {
    let script = "trap 'echo ended early' TERM; sleep $((RANK * 3)); exit 75";
    let end = Run::launch(2, &["sh", "-c", script], &[]).end(PROMISED);
    assert_eq!(end.code, Some(75), "{end:?}");
    assert!(
        !end.out.iter().any(|line| line.contains("early")),
        "{end:?}"
    );
    let last = end.err.last().unwrap();
    assert!(
        last.contains("stopped; every rank exited with code 75"),
        "{end:?}"
    );
    Ok(())
}

pub(crate) fn suspended() -> Result<(), Failed> {
    let mut run = Run::ranks(2, &["patient"]);
    let pids = run.pids();
    let await_state = |stopped: bool| {
        let until = Instant::now() + Duration::from_secs(5);
        while !pids
            .iter()
            .all(|pid| (run::state(*pid) == Some('T')) == stopped)
        {
            assert!(Instant::now() < until, "stopped: {stopped}");
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    run.signal(Signal::SIGTSTP);
    await_state(true);
    run.signal(Signal::SIGCONT);
    await_state(false);
    run.signal(Signal::SIGTERM);
    let end = run.end(PROMISED);
    assert_eq!(end.code, Some(0), "{end:?}");
    run::assert_gone(&pids);
    Ok(())
}
