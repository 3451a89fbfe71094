use std::{
    env,
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use megaburn_checkpoint::{Advance, CheckpointError, find_latest, prepare};
use megaburn_collective::{GroupOptions, ProcessGroups, run_threads};

use rstest::rstest;

use crate::model::{Random, alone, begin_rank, check, names, save_rank};

const CHILD_MODE: &str = "MEGABURN_TEST_KILL_MODE";
const CHILD_DIR: &str = "MEGABURN_TEST_KILL_DIR";

#[rstest]
fn kill_9_at_any_moment_leaves_the_last_committed_checkpoint_or_a_newer_one(
    #[values("sync", "async")] mode: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let mut random = Random::fresh();
    let mut committed = 0;
    let mut leftovers = 0;
    for round in 0..12 {
        let before = committed;
        committed = committed.max(saves_until_killed(dir.path(), mode, &mut random));
        assert!(committed > before, "round {round}: nothing was saved");
        leftovers += names(dir.path())
            .iter()
            .filter(|name| name.contains('.'))
            .count();

        let latest = find_latest(dir.path(), &alone()).unwrap();
        assert!(
            latest.refused.is_empty(),
            "round {round}: {:?}",
            latest.refused
        );
        let checkpoint = latest.checkpoint.expect("one was committed");
        assert!(
            checkpoint.step() >= committed,
            "round {round}: {committed} was lost"
        );
        committed = checkpoint.step();
        check(&checkpoint, committed, 1);
        prepare(dir.path(), &alone()).unwrap();
        assert!(
            names(dir.path()).iter().all(|name| !name.contains('.')),
            "round {round}"
        );
    }
    assert!(leftovers > 0, "no kill came in the middle of a save");
}

/// Starts a child that keeps saving checkpoints, kills it at a random moment after a random number
/// of them, and returns the last step that it reported as saved.
fn saves_until_killed(dir: &Path, mode: &str, random: &mut Random) -> u64 {
    let mut child = Command::new(env::current_exe().unwrap())
        .args([
            "--exact",
            "kill::child_saves_until_killed",
            "--ignored",
            "--nocapture",
        ])
        .env(CHILD_DIR, dir)
        .env(CHILD_MODE, mode)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut last = 0;
    let mut saved = || {
        let line = lines.find_map(|line| line.unwrap().strip_prefix("saved ").map(str::to_string));
        line.map(|step| last = step.parse().unwrap()).is_some()
    };
    for _ in 0..=random.below(3) {
        assert!(saved(), "the child ended by itself");
    }
    thread::sleep(Duration::from_micros(random.below(12_000)));
    child.kill().unwrap();
    child.wait().unwrap();
    while saved() {}
    last
}

#[test]
#[ignore = "the child of the test above"]
fn child_saves_until_killed() {
    let dir = env::var(CHILD_DIR).expect("started by its parent test");
    let dir: &Path = dir.as_ref();
    let is_async = env::var(CHILD_MODE).is_ok_and(|mode| mode == "async");
    run_threads(2, GroupOptions::default(), |world| {
        prepare(dir, &world)?;
        let groups = ProcessGroups::new(&world, "tp2".parse().expect("a layout"))?;
        let first = find_latest(dir, &world)?
            .checkpoint
            .map_or(1, |found| found.step() + 1);
        // The parent kills the child long before the end; the bound matters if the parent is gone.
        for step in first..first + 2000 {
            if is_async {
                let mut save = begin_rank(dir, 2, step, &groups)?;
                while save.advance(&groups)? != Advance::Done {}
            } else {
                save_rank(dir, 2, step, &groups)?;
            }
            if world.rank() == 0 {
                println!("\nsaved {step}");
            }
        }
        Ok::<_, CheckpointError>(())
    });
}
