//! Deleting old checkpoints of a run that is not in progress.

use std::{
    fs,
    path::{Path, PathBuf},
};

use megaburn_checkpoint::{CheckpointError, PrunePlan, Retention, Snapshot, plan_prune, save};
use megaburn_collective::ProcessGroups;
use megaburn_mesh::Layout;

use crate::model::{alone, named, names, snapshot, tensors};

fn save_of(dir: &Path, run_id: Option<&str>, step: u64) {
    let groups = ProcessGroups::new(&alone(), Layout::SINGLE).unwrap();
    let snapshot = Snapshot {
        run_id: run_id.map(String::from),
        ..snapshot(step)
    };
    let tensors = tensors(0, 1);
    let tensors = tensors.iter().map(|tensor| named(tensor, step));
    save(
        dir,
        &Retention::default(),
        None,
        &groups,
        &snapshot,
        tensors,
    )
    .unwrap();
}

/// A folder with checkpoints of the run `own` at these steps.
fn folder(steps: &[u64]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    steps
        .iter()
        .for_each(|step| save_of(dir.path(), Some("own"), *step));
    dir
}

/// The last byte of a file is another, which only its hash reveals.
fn flip(dir: &Path, step: u64) {
    let file = dir.join(format!("step-{step:08}/rank-00000.safetensors"));
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
}

fn rule(newest: usize, every: u64) -> Retention {
    Retention {
        every,
        ..Retention::newest(newest)
    }
}

fn plan(dir: &Path, newest: usize, every: u64) -> PrunePlan {
    plan_prune(dir, "own", &rule(newest, every), &mut |_| {}).unwrap()
}

fn steps(checkpoints: &[(u64, PathBuf)]) -> Vec<u64> {
    checkpoints.iter().map(|(step, _)| *step).collect()
}

fn steps_in(dir: &Path) -> Vec<u64> {
    let step = |name: &String| name.strip_prefix("step-").unwrap().parse().unwrap();
    names(dir).iter().map(step).collect()
}

#[test]
fn the_newest_and_every_kth_stay() {
    for (keep, every, kept) in [
        (1, 0, &[70][..]),
        (3, 0, &[50, 60, 70]),
        (9, 0, &[10, 20, 30, 40, 50, 60, 70]),
        (2, 30, &[30, 60, 70]),
        (1, 20, &[20, 40, 60, 70]),
        (1, 1, &[10, 20, 30, 40, 50, 60, 70]),
    ] {
        let dir = folder(&[10, 20, 30, 40, 50, 60, 70]);
        let plan = plan(dir.path(), keep, every);
        assert_eq!(steps_in(dir.path()).len(), 7, "a plan deletes nothing");
        let newest_first: Vec<_> = kept.iter().rev().copied().collect();
        assert_eq!(steps(&plan.kept), newest_first);
        plan.delete().unwrap();
        assert_eq!(steps_in(dir.path()), kept, "{keep} {every}");
        assert_eq!(plan.kept.len() + plan.deleted.len(), 7);
    }
}

#[test]
fn a_damaged_one_neither_counts_nor_is_deleted() {
    let dir = folder(&[10, 20, 30, 40, 50]);
    flip(dir.path(), 50);
    flip(dir.path(), 20);
    // An incomplete one is not the run's, as far as is known.
    fs::remove_file(dir.path().join("step-00000030/rank-00000.safetensors")).unwrap();
    let mut read = 0;
    let plan = plan_prune(dir.path(), "own", &rule(1, 20), &mut |bytes| read += bytes).unwrap();
    assert_eq!(
        (steps(&plan.kept), steps(&plan.deleted)),
        (vec![40], vec![10])
    );
    let damaged: Vec<_> = plan
        .damaged
        .iter()
        .map(|refused| refused.path.clone())
        .collect();
    assert_eq!(
        damaged,
        [50, 20].map(|step| dir.path().join(format!("step-{step:08}")))
    );
    assert!(
        plan.damaged[0].why.contains("have xxh3"),
        "{:?}",
        plan.damaged
    );
    assert_eq!(plan.num_others, 1);
    assert!(read > 0);
    plan.delete().unwrap();
    assert_eq!(steps_in(dir.path()), [20, 30, 40, 50]);
}

#[test]
fn the_best_stay_and_a_damaged_one_gives_its_place_to_the_next() {
    let dir = folder(&[10, 20, 30, 40, 50]);
    let losses = [(10, 2.0), (20, 1.0), (30, 1.5), (40, f64::NAN), (60, 0.5)];
    let retention = Retention {
        best: 2,
        losses: losses.into(),
        ..Retention::newest(1)
    };
    let plan = |retention| plan_prune(dir.path(), "own", retention, &mut |_| {}).unwrap();
    assert_eq!(steps(&plan(&retention).kept), [50, 30, 20]);
    flip(dir.path(), 20);
    let plan = plan(&retention);
    assert_eq!(steps(&plan.kept), [50, 30, 10]);
    assert_eq!((steps(&plan.deleted), plan.damaged.len()), (vec![40], 1));
    plan.delete().unwrap();
    assert_eq!(steps_in(dir.path()), [10, 20, 30, 50]);
}

#[test]
fn those_of_others_stay_and_do_not_count() {
    let dir = folder(&[10, 20]);
    save_of(dir.path(), Some("other"), 5);
    save_of(dir.path(), Some("other"), 90);
    save_of(dir.path(), None, 0);
    fs::create_dir(dir.path().join("step-00000007")).unwrap();
    let plan = plan(dir.path(), 1, 0);
    assert_eq!(plan.num_others, 4);
    plan.delete().unwrap();
    assert_eq!(steps_in(dir.path()), [0, 5, 7, 20, 90]);
}

#[test]
fn nothing_is_deleted_if_the_folder_has_changed_since() {
    type Change = fn(&Path);
    let changes: [Change; 3] = [
        |dir| save_of(dir, Some("own"), 40),
        |dir| fs::remove_dir_all(dir.join("step-00000030")).unwrap(),
        // The same step anew, with other contents.
        |dir| {
            fs::rename(dir.join("step-00000010"), dir.join("old")).unwrap();
            save_of(dir, Some("own"), 30);
            fs::remove_dir_all(dir.join("old")).unwrap();
        },
    ];
    for change in changes {
        let dir = folder(&[10, 20, 30]);
        let plan = plan(dir.path(), 1, 0);
        change(dir.path());
        let before = names(dir.path());
        let error = plan.delete().unwrap_err();
        assert!(matches!(error, CheckpointError::Changed { .. }), "{error}");
        assert_eq!(names(dir.path()), before);
    }
}

#[test]
fn a_link_is_removed_and_its_checkpoint_stays() {
    let dir = folder(&[10, 20]);
    let disk = tempfile::tempdir().unwrap();
    let there = disk.path().join("step");
    let link = dir.path().join("step-00000010");
    fs::rename(&link, &there).unwrap();
    std::os::unix::fs::symlink(&there, &link).unwrap();
    plan(dir.path(), 1, 0).delete().unwrap();
    assert_eq!(steps_in(dir.path()), [20]);
    assert!(there.join("manifest.json").is_file());
    assert!(!there.join(".megaburn-owner").exists());
}
