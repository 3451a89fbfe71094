//! Jobs of one host whose ranks fail and are started again.

use std::time::Duration;

use libtest_mimic::Failed;
use nix::sys::signal::Signal;

use super::{
    PROMISED,
    run::{End, Run},
};

/// Runs a shell script as two ranks, with a number of restarts.
fn launch(restarts: &str, script: &str) -> Run {
    Run::launch(2, &["sh", "-c", script], &[("TEST_RESTARTS", restarts)])
}

fn has_line(end: &End, text: &str) -> bool {
    end.err.iter().any(|line| line.contains(text))
}

pub(crate) fn succeeds() -> Result<(), Failed> {
    // Each attempt has its own token, and all have the same id.
    let script = "echo \"token $MEGABURN_JOB_TOKEN\"; echo \"id $MEGABURN_LAUNCH_ID\"; \
        echo \"cause $TORCHELASTIC_RESTART_COUNT: ${MEGABURN_RESTART_CAUSE-none}\"; \
        [ $TORCHELASTIC_RESTART_COUNT -lt 2 ] && [ $RANK = 1 ] && kill -9 $$; \
        [ $TORCHELASTIC_RESTART_COUNT -lt 2 ] && sleep 60; exit 0";
    let end = launch("3", script).end(PROMISED);
    assert_eq!(end.code, Some(0), "{end:?}");
    for (text, is_there) in [
        ("rank 1 was killed by SIGKILL", true),
        ("restart 1 of 3 in 1 s", true),
        ("restart 2 of 3 in 2 s", true),
        ("restart 3", false),
    ] {
        assert_eq!(has_line(&end, text), is_there, "{text}: {end:?}");
    }
    let different = |name: &str| {
        let lines = end.out.iter().filter(|line| line.starts_with(name));
        lines.collect::<std::collections::BTreeSet<_>>().len()
    };
    assert_eq!((different("token"), different("id")), (3, 1), "{end:?}");
    // The ranks of an attempt know why the one before it ended. Rank 0 may end before it says so.
    for cause in [
        "cause 0: none",
        "cause 1: rank 1 was killed by SIGKILL",
        "cause 2: rank 1 was killed by SIGKILL",
    ] {
        let line = format!("[rank 1] {cause}");
        assert!(end.out.contains(&line), "{line}: {end:?}");
    }
    Ok(())
}

pub(crate) fn spent() -> Result<(), Failed> {
    let end = launch("1", "[ $RANK = 0 ] && exit 1; sleep 60").end(PROMISED);
    assert_eq!(end.code, Some(1), "{end:?}");
    assert!(has_line(&end, "no restart is left of 1 restart"), "{end:?}");
    Ok(())
}

pub(crate) fn wrong_configuration() -> Result<(), Failed> {
    let end = launch("5", "[ $RANK = 0 ] && exit 2; sleep 60").end(PROMISED);
    assert_eq!(end.code, Some(2), "{end:?}");
    assert!(has_line(&end, "no restart: exit code 2"), "{end:?}");
    assert!(!has_line(&end, "restart 1"), "{end:?}");
    Ok(())
}

pub(crate) fn stopped_in_pause() -> Result<(), Failed> {
    let mut run = launch("9", "exit 1");
    // The third pause takes four seconds.
    run.await_line("restart 3 of 9 in 4 s");
    run.signal(Signal::SIGTERM);
    let end = run.end(Duration::from_secs(2));
    assert_eq!(end.code, Some(1), "{end:?}");
    assert!(has_line(&end, "stopped by SIGTERM"), "{end:?}");
    Ok(())
}

/// Launches ranks of this program that restart in place.
fn launch_in_place(restarts: &str) -> End {
    let this = std::env::current_exe().unwrap();
    let command = [this.to_str().unwrap(), "rank", "in-place"];
    let env = [("TEST_RESTARTS", restarts), ("TEST_IN_PLACE", "1")];
    Run::launch(3, &command, &env).end(PROMISED)
}

pub(crate) fn in_place() -> Result<(), Failed> {
    let end = launch_in_place("3");
    assert_eq!(end.code, Some(0), "{end:?}");
    for text in [
        "restart in place: ranks 0, 2; started anew: rank 1",
        "no restart in place: ranks failed again after step 5",
    ] {
        assert!(has_line(&end, text), "{text}: {end:?}");
    }
    // The sum of 1, 2 and 3, in the third attempt.
    assert_eq!(
        end.out
            .iter()
            .filter(|line| line.ends_with("sum 6"))
            .count(),
        3
    );
    let process = |rank: usize, attempt: usize| {
        let prefix = if rank == 0 {
            String::new()
        } else {
            format!("[rank {rank}] ")
        };
        let start = format!("{prefix}attempt {attempt} is process ");
        let found = end.out.iter().find_map(|line| line.strip_prefix(&start));
        found.unwrap_or_else(|| panic!("{start}: {end:?}"))
    };
    for rank in [0, 2] {
        assert_eq!(process(rank, 0), process(rank, 1), "{end:?}");
        assert_ne!(process(rank, 1), process(rank, 2), "{end:?}");
    }
    assert_ne!(process(1, 0), process(1, 1), "{end:?}");
    Ok(())
}

pub(crate) fn in_place_without_restart() -> Result<(), Failed> {
    let end = launch_in_place("1");
    assert_eq!(end.code, Some(137), "{end:?}");
    assert!(has_line(&end, "no restart is left of 1 restart"), "{end:?}");
    // Each says why it ended.
    assert!(has_line(&end, "lost rank 1"), "{end:?}");
    Ok(())
}
