//! The programs of `examples/learner`: one that trains with Burn's Learner on one device, and the
//! same one on the ranks of a layout.

use std::{fs, path::Path, process::Command};

use super::{outside::program, rules::root};

/// The most lines of the first program that may have to change.
const MOST_CHANGED: usize = 15;

/// Runs a program in a new folder. Returns the folder, and what it printed.
fn run(name: &str, args: &[&str]) -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new(program(name))
        .args(args)
        .current_dir(dir.path())
        .env("RAYON_NUM_THREADS", "1")
        .output()
        .unwrap();
    let printed = [output.stdout, output.stderr].concat();
    let printed = String::from_utf8(printed).unwrap();
    assert!(output.status.success(), "{name} {args:?}: {printed}");
    (dir, printed)
}

/// A metric of an epoch, as Burn's logger wrote it.
fn of_epoch(dir: &Path, split: &str, epoch: usize, metric: &str) -> f64 {
    let path = dir.join(format!("spirals/{split}/epoch-{epoch}/{metric}.log"));
    let text = fs::read_to_string(&path).unwrap();
    let last = text.lines().find_map(|line| line.strip_suffix(",final"));
    last.unwrap().parse().unwrap()
}

#[test]
fn a_learner_program_changes_a_few_lines_to_train_in_parallel() {
    let read = |name: &str| {
        let path = root().join("examples/learner/src").join(name);
        fs::read_to_string(path).unwrap()
    };
    let (before, after) = (read("one_device.rs"), read("parallel.rs"));
    let before: Vec<&str> = before.lines().collect();
    let after: Vec<&str> = after.lines().collect();
    let common = num_common(&before, &after);
    let changed = before.len().max(after.len()) - common;
    assert!((5..=MOST_CHANGED).contains(&changed), "{changed} lines");
}

/// The number of lines that both have in the same order: the length of their longest common
/// subsequence.
pub(super) fn num_common(a: &[&str], b: &[&str]) -> usize {
    let mut row = vec![0; b.len() + 1];
    for line in a {
        let mut diagonal = 0;
        for (at, other) in b.iter().enumerate() {
            let above = row[at + 1];
            row[at + 1] = match line == other {
                true => diagonal + 1,
                false => above.max(row[at]),
            };
            diagonal = above;
        }
    }
    row[b.len()]
}

#[test]
fn a_learner_program_learns_the_same_under_every_layout() {
    let (one_device, _) = run("one_device", &[]);
    assert!(of_epoch(one_device.path(), "valid", 20, "Accuracy") > 90.0);

    let layouts = ["tp1", "tp2", "tp4"];
    let losses = layouts.map(|layout| {
        let (dir, printed) = run("parallel", &["--layout", layout]);
        // One rank shows the summary.
        assert_eq!(printed.matches("Total Epochs").count(), 1, "{printed}");
        let at = |epoch| of_epoch(dir.path(), "valid", epoch, "Loss");
        (at(1), at(20))
    });
    assert!(losses[0].1 < 0.5 * losses[0].0, "{losses:?}");
    for (first, last) in losses {
        let close = |found: f64, expected: f64| (found - expected).abs() <= 1e-4 * expected;
        assert!(
            close(first, losses[0].0) && close(last, losses[0].1),
            "{losses:?}"
        );
    }
    let (data_parallel, _) = run("parallel", &["--layout=tp2-dp2"]);
    assert!(of_epoch(data_parallel.path(), "valid", 20, "Accuracy") > 90.0);
}
