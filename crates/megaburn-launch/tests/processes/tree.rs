//! Failures of ranks that have no connection to most others: they travel along the tree of ranks.

use std::time::Instant;

use libtest_mimic::Failed;
use nix::sys::signal::Signal;

use crate::{
    PROMISED,
    rank::TIMEOUT,
    run::{self, End, Run},
};

/// Rank 1 is next to ranks 0, 3 and 4; rank 7 is behind rank 3.
const RANKS: usize = 8;

/// Panics unless each rank but `except` has written an error with this text.
fn assert_all_say(end: &End, except: &[usize], text: &str) {
    for rank in (0..RANKS).filter(|rank| !except.contains(rank)) {
        let own = format!("rank {rank}, group world");
        let said = |line: &&String| line.contains(&own) && line.contains(text);
        assert!(
            end.err.iter().any(|line| said(&line)),
            "rank {rank}: {end:?}"
        );
    }
}

pub(crate) fn killed() -> Result<(), Failed> {
    let mut run = Run::ranks(RANKS, &["barriers"]);
    let pids = run.pids();
    run::signal(pids[1], Signal::SIGKILL);
    let end = run.end(PROMISED);
    assert_eq!(end.code, Some(128 + 9), "{end:?}");
    assert_all_say(&end, &[1], "lost rank 1: ");
    run::assert_gone(&pids);
    Ok(())
}

/// Ranks 3, 4 and 7 hear that rank 2 failed, although rank 1 passes nothing on.
pub(crate) fn passes_stopped() -> Result<(), Failed> {
    let mut run = Run::ranks(RANKS, &["barriers", "2"]);
    let pids = run.pids();
    run::signal(pids[1], Signal::SIGSTOP);
    let begin = Instant::now();
    run::signal(pids[2], Signal::SIGUSR1);
    let end = run.end(PROMISED);
    assert!(begin.elapsed() < 2 * TIMEOUT, "{end:?}");
    let text = "was ended by rank 2, which failed first: its disk is full";
    assert_all_say(&end, &[1, 2], text);
    run::assert_gone(&pids);
    Ok(())
}
