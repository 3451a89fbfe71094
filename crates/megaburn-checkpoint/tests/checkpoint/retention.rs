//! Which checkpoints of a folder stay, and who may write to it.

use std::{fs, path::Path};

use megaburn_checkpoint::{
    CheckpointError, Retention, Snapshot, checkpoints_of, find_latest, move_checkpoints, save,
    set_aside_damaged,
};
use megaburn_collective::ProcessGroups;
use megaburn_mesh::Layout;

use crate::model::{alone, check, named, names, save_as, snapshot, tensors};

fn damage(checkpoint: &Path) {
    let file = checkpoint.join("rank-00000.safetensors");
    fs::File::options()
        .write(true)
        .open(file)
        .unwrap()
        .set_len(100)
        .unwrap();
}

#[test]
fn the_newest_whole_ones_are_kept_and_damaged_ones_do_not_count() {
    let dir = tempfile::tempdir().unwrap();
    for step in [10, 20, 30, 40] {
        save_as(dir.path(), 0, step, "tp1");
    }
    damage(&dir.path().join("step-00000030"));
    // A damaged checkpoint precedes the new one, and a later step belongs to another past of the
    // run.
    save_as(dir.path(), 2, 35, "tp1");
    let kept = [
        "step-00000020",
        "step-00000030",
        "step-00000035",
        "step-00000040",
    ];
    assert_eq!(names(dir.path()), kept);
    save_as(dir.path(), 2, 36, "tp1");
    let kept = [
        "step-00000030",
        "step-00000035",
        "step-00000036",
        "step-00000040",
    ];
    assert_eq!(names(dir.path()), kept);
}

#[test]
fn one_that_is_counted_on_is_read_before_an_older_one_is_deleted() {
    let dir = tempfile::tempdir().unwrap();
    for step in [10, 20, 30] {
        save_as(dir.path(), 0, step, "tp1");
    }
    // The length is right, so only the hash reveals the damage.
    let file = dir.path().join("step-00000030/rank-00000.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    save_as(dir.path(), 2, 40, "tp2");
    assert_eq!(
        names(dir.path()),
        ["step-00000020", "step-00000030", "step-00000040"]
    );
    save_as(dir.path(), 2, 50, "tp2");
    assert_eq!(
        names(dir.path()),
        ["step-00000030", "step-00000040", "step-00000050"]
    );
}

/// Saves a checkpoint of a run, or of no run, as a conversion does.
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
        &Retention::newest(1),
        None,
        &groups,
        &snapshot,
        tensors,
    )
    .unwrap();
}

#[test]
fn what_another_run_or_a_conversion_wrote_is_neither_counted_nor_deleted() {
    let dir = tempfile::tempdir().unwrap();
    for (run_id, step) in [
        (None, 0),
        (Some("other"), 5),
        (Some("own"), 3),
        (Some("own"), 6),
    ] {
        save_of(dir.path(), run_id, step);
    }
    assert_eq!(
        names(dir.path()),
        ["step-00000000", "step-00000005", "step-00000006"]
    );
    let own = checkpoints_of(dir.path(), "own").unwrap();
    assert_eq!(own, [(6, dir.path().join("step-00000006"))]);
}

#[test]
fn a_link_to_a_checkpoint_is_removed_and_the_checkpoint_stays() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk");
    save_of(dir.path(), Some("own"), 3);
    fs::rename(dir.path().join("step-00000003"), &disk).unwrap();
    std::os::unix::fs::symlink(&disk, dir.path().join("step-00000003")).unwrap();
    let before = names(&disk);
    save_of(dir.path(), Some("own"), 3);
    assert_eq!(names(&disk), before, "its place was taken");
    save_of(dir.path(), Some("own"), 6);
    assert_eq!(
        (names(dir.path()), names(&disk)),
        (vec!["disk".into(), "step-00000006".into()], before)
    );
}

#[test]
fn a_damaged_one_is_set_aside_and_stays() {
    let dir = tempfile::tempdir().unwrap();
    for step in [1, 2] {
        save_as(dir.path(), 0, step, "tp1");
    }
    let newest = dir.path().join("step-00000002");
    damage(&newest);
    let aside = set_aside_damaged(&newest).unwrap();
    assert!(
        aside
            .file_name()
            .unwrap()
            .to_string_lossy()
            .starts_with("step-00000002.damaged-")
    );
    let found = find_latest(dir.path(), &alone()).unwrap();
    assert!(found.refused.is_empty());
    check(&found.checkpoint.unwrap(), 1, 1);
    // The next start and the next saves do not touch it.
    for step in [2, 3, 4] {
        save_as(dir.path(), 1, step, "tp1");
    }
    assert!(aside.is_dir());
    assert_eq!(names(dir.path()).len(), 2);
}

#[test]
fn checkpoints_are_moved_and_other_files_stay() {
    let dir = tempfile::tempdir().unwrap();
    let [from, to] = ["from", "to"].map(|name| dir.path().join(name));
    fs::create_dir(&to).unwrap();
    for step in [1, 2] {
        save_as(&from, 0, step, "tp1");
    }
    fs::write(from.join("notes"), "mine").unwrap();
    move_checkpoints(&from, &to).unwrap();
    assert_eq!(names(&from), ["notes"]);
    assert_eq!(names(&to), ["step-00000001", "step-00000002"]);
    move_checkpoints(&to, &from).unwrap();
    check(
        &find_latest(&from, &alone()).unwrap().checkpoint.unwrap(),
        2,
        1,
    );
}

/// Saves step 2 with a guard that refuses at some point.
fn guarded(dir: &Path, guard: &dyn Fn() -> Result<(), String>) -> CheckpointError {
    let groups = ProcessGroups::new(&alone(), Layout::SINGLE).unwrap();
    let tensors = tensors(0, 1);
    let tensors = tensors.iter().map(|tensor| named(tensor, 2));
    save(
        dir,
        &Retention::newest(2),
        Some(guard),
        &groups,
        &snapshot(2),
        tensors,
    )
    .unwrap_err()
}

#[test]
fn a_guard_is_asked_before_the_first_byte_and_before_the_commit() {
    let dir = tempfile::tempdir().unwrap();
    save_as(dir.path(), 2, 1, "tp1");
    for good in 0..2 {
        let asked = std::cell::Cell::new(0);
        let error = guarded(dir.path(), &|| {
            asked.set(asked.get() + 1);
            if asked.get() > good {
                Err("another run is here".to_string())
            } else {
                Ok(())
            }
        });
        assert!(error.to_string().contains("another run is here"), "{error}");
        assert_eq!(asked.get(), good + 1);
        assert_eq!(names(dir.path()), ["step-00000001"]);
    }
}

#[test]
fn a_folder_that_was_removed_is_not_made_anew() {
    let dir = tempfile::tempdir().unwrap();
    let gone = dir.path().join("run/checkpoints");
    guarded(&gone, &|| Ok(()));
    assert!(names(dir.path()).is_empty());
}
