//! Runs that `megaburn launch --restarts` starts again.

use std::fs;

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

use crate::runs::child::{PATIENCE, Ranks};
use megaburn_test_support::run::Run;

const MEGABURN: &str = env!("CARGO_BIN_EXE_megaburn-under-test");
pub(super) const STEPS: u64 = 12;

/// `megaburn launch` of a run with two ranks, which saves every second step.
pub(super) fn launch(run: &Run, layout: &str, steps: u64, flags: &[&str], more: &[&str]) -> Ranks {
    let sets = ["train.checkpoint_interval=2", "train.timeout_seconds=4"];
    let train = run.args(layout, steps, &sets);
    let mut args = vec!["launch", "--nproc", "2"];
    args.extend(flags);
    args.extend(["--", MEGABURN, "train"]);
    args.extend(train.iter().map(String::as_str));
    args.extend(more);
    Ranks::command(&args)
}

/// The process of a rank: one that runs `train` with this rank in its environment.
pub(super) fn process_of_rank(rank: usize, run: &Run) -> Option<Pid> {
    let config = run.path("config.toml").display().to_string();
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let is_rank = |process: &fs::DirEntry| {
        let read = |name| fs::read(process.path().join(name)).unwrap_or_default();
        let has = |bytes: &[u8], text: &str| {
            bytes
                .split(|byte| *byte == 0)
                .any(|part| part == text.as_bytes())
        };
        let command = read("cmdline");
        has(&read("environ"), &format!("RANK={rank}"))
            && has(&command, &config)
            && !has(&command, "launch")
            && !has(&command, "launch-child")
    };
    let found = processes
        .filter(is_rank)
        .find_map(|process| process.file_name().to_str()?.parse().ok());
    found.map(Pid::from_raw)
}

/// The restarts that the starts in the metrics name, with their causes.
pub(super) fn restarts(run: &Run) -> Vec<(u64, String)> {
    let text = fs::read_to_string(run.path("run/metrics.jsonl")).unwrap();
    let lines = text
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap());
    let restart = |line: Value| {
        let cause = line.get("cause")?.as_str()?.to_string();
        Some((line.get("restart")?.as_u64()?, cause))
    };
    lines.filter_map(restart).collect()
}

#[test]
fn a_run_whose_ranks_are_killed_ends_as_one_that_was_not_disturbed() {
    let (run, undisturbed) = (Run::new(), Run::new());
    fs::copy(run.path("text.txt"), undisturbed.path("text.txt")).unwrap();
    launch(&undisturbed, "dp2", STEPS, &[], &[]).finish();
    // An old run is in the folder: it is replaced once, not at each restart.
    let mut old = run.args("dp2", 2, &[]);
    old.extend(["--set".into(), "run.seed=99".into()]);
    Ranks::threads(&old).finish();
    let mut ranks = launch(&run, "dp2", STEPS, &["--restarts", "5"], &["--fresh"]);
    for (victim, signal, step) in [(1, Signal::SIGKILL, 3), (0, Signal::SIGSTOP, 7)] {
        ranks.wait_until(|| run.steps().len() as u64 >= step && run.steps().len() < 12);
        let process = process_of_rank(victim, &run).expect("it runs");
        kill(process, signal).unwrap();
        let before = run.steps().len();
        ranks.wait_until(|| {
            let now = process_of_rank(victim, &run);
            now.is_some_and(|now| now != process) && run.steps().len() != before
        });
    }
    let ended = ranks.wait(0, std::time::Instant::now() + PATIENCE);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stderr.contains("restart 1 of 5 in 1 s"), "{ended:?}");
    let continues = "--fresh was done before the restart";
    assert!(
        ended.stdout.contains(continues) || ended.stderr.contains(continues),
        "{ended:?}"
    );
    assert_eq!(run.numbers(), undisturbed.numbers());
    let restarts_of_run = restarts(&run);
    let (numbers, causes): (Vec<u64>, Vec<String>) = restarts_of_run.into_iter().unzip();
    assert_eq!(numbers, [1, 2]);
    assert_eq!(causes[0], "rank 1 was killed by SIGKILL");
    // The rank that hung may still end by itself when it is asked to.
    assert!(
        causes[1].ends_with("rank 1 exited with code 4"),
        "{causes:?}"
    );
    assert!(restarts(&undisturbed).is_empty());
    assert!(run.tensors(STEPS) == undisturbed.tensors(STEPS));
}

/// The restart begins when the limit has passed, so it makes one step, as each start does.
#[test]
fn the_time_limit_counts_from_the_first_start() {
    let run = Run::new();
    let sets = [
        "train.checkpoint_interval=1",
        "train.exit_after_minutes=0.05",
    ];
    let train = run.args("dp2", 1_000_000, &sets);
    let script = "[ $TORCHELASTIC_RESTART_COUNT = 0 ] || sleep 3; exec \"$@\"";
    let mut args = vec!["launch", "--nproc", "2", "--restarts", "5", "--"];
    args.extend(["sh", "-c", script, "sh", MEGABURN, "train"]);
    args.extend(train.iter().map(String::as_str));
    let mut ranks = Ranks::command(&args);
    ranks.wait_until(|| run.steps().len() >= 2);
    let process = process_of_rank(1, &run).expect("it runs");
    kill(process, Signal::SIGKILL).unwrap();
    let ended = ranks.wait(0, std::time::Instant::now() + PATIENCE);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stderr.contains("restart 1 of 5"), "{ended:?}");
    let resumed = ended.stdout.split("resumed  after step ").nth(1);
    let resumed = resumed.and_then(|rest| rest.split(' ').next()?.parse::<u64>().ok());
    let last = run.steps().last().map(|step| step.step);
    assert_eq!(last, resumed.map(|step| step + 1), "{ended:?}");
    let state = fs::read_to_string(run.path("run/state.json")).unwrap();
    assert!(state.contains("train.exit_after_minutes"), "{state}");
}
