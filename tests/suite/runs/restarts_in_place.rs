//! Runs that `megaburn launch --restart-in-place` restarts in the processes that are left.

use std::{fs, time::Instant};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::restarts::{STEPS, launch, process_of_rank, restarts};
use crate::runs::child::{PATIENCE, Ranks};
use megaburn_test_support::run::Run;

/// The threads of a process that read what other ranks send.
fn connections(process: Pid) -> usize {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let name = |task: fs::DirEntry| fs::read_to_string(task.path().join("comm"));
    let names = tasks.flatten().filter_map(|task| name(task).ok());
    // A thread that has read the introduction of a caller reads its messages too.
    let reads = |name: &String| name.contains("-from-") || name.trim_end() == "introduction";
    names.filter(reads).count()
}

/// Backward passes of `tp2` communicate, so a lost peer unwinds them.
#[test]
fn ranks_that_lose_a_peer_keep_their_process_and_end_as_if_undisturbed() {
    let (run, undisturbed) = (Run::new(), Run::new());
    fs::copy(run.path("text.txt"), undisturbed.path("text.txt")).unwrap();
    launch(&undisturbed, "tp2", STEPS, &[], &[]).finish();
    // An old run is in the folder: it is replaced once, not at each restart.
    let old = run.args("tp2", 2, &["run.seed=99"]);
    Ranks::threads(&old).finish();
    let flags = ["--restarts", "5", "--restart-in-place"];
    let mut ranks = launch(&run, "tp2", STEPS, &flags, &["--fresh"]);
    // Rank 0 writes for all, and waits for the others in a restart.
    for (victim, step) in [(1, 3), (0, 7)] {
        ranks.wait_until(|| run.steps().len() as u64 >= step && run.steps().len() < 12);
        let processes = [0, 1].map(|rank| process_of_rank(rank, &run).expect("it runs"));
        kill(processes[victim], Signal::SIGKILL).unwrap();
        let before = restarts(&run).len();
        ranks.wait_until(|| restarts(&run).len() > before);
        let now = [0, 1].map(|rank| process_of_rank(rank, &run).expect("it runs"));
        assert_ne!(now[victim], processes[victim]);
        assert_eq!(now[1 - victim], processes[1 - victim]);
        // Nothing of the attempt before is left.
        assert_eq!(connections(now[1 - victim]), 1);
    }
    let ended = ranks.wait(0, Instant::now() + PATIENCE);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    for line in [
        "restart in place: rank 0; started anew: rank 1",
        "restart in place: rank 1; started anew: rank 0",
    ] {
        assert!(ended.stderr.contains(line), "{line}: {ended:?}");
    }
    assert_eq!(run.numbers(), undisturbed.numbers());
    let restarts_of_run = restarts(&run);
    let causes = [(1, 1), (2, 0)].map(|(number, rank)| {
        let cause = format!("rank {rank} was killed by SIGKILL");
        (number, cause)
    });
    assert_eq!(restarts_of_run, causes);
    assert!(run.tensors(STEPS) == undisturbed.tensors(STEPS));
}
