use megaburn_models::assets::ASSETS;

use super::*;
use crate::{ConfigLayers, Exit, run_folder::names::METRICS};

fn config(dir: &Path) -> TrainConfig {
    let mut config = ConfigLayers::new().load().unwrap();
    config.run.dir = dir.display().to_string();
    config
}

fn take(dir: &Path) -> Result<RunShare, TrainError> {
    RunShare::take(&Group::single(0), &config(dir))
}

fn anew(share: RunShare, dir: &Path) -> RunShare {
    share.begin_anew(&Group::single(0), &config(dir)).unwrap()
}

fn folder(share: &RunShare) -> &RunFolder {
    share.folder.as_ref().unwrap()
}

/// A file that stands for a checkpoint, and one for its metrics.
fn fill(dir: &Path, step: u64) {
    let step = dir.join(CHECKPOINTS).join(format!("step-{step:08}"));
    fs::create_dir_all(&step).unwrap();
    fs::write(step.join("weights"), "years").unwrap();
    fs::write(dir.join(METRICS), "{\"step\":1,\"eval_loss\":1.0}\n").unwrap();
}

#[test]
fn a_run_keeps_its_id_and_a_folder_is_no_other_runs() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("a/b");
    let first = take(&run).unwrap();
    assert!(take(&run).unwrap_err().to_string().contains("belongs to a run that is going on"));
    let id = first.id.clone();
    drop(first);
    let again = take(&run).unwrap();
    assert_eq!(again.id, id);
    again.check().unwrap();
    assert!(fs::read_to_string(run.join(names::LOCK)).unwrap().contains(&id));
}

#[test]
fn a_file_is_no_folder_and_other_files_are_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    let error = take(&file).unwrap_err();
    assert!(error.to_string().contains("cannot be the run's folder"), "{error}");
    assert_eq!(error.exit(), Exit::BadInput);
    let error = take(dir.path()).unwrap_err();
    assert!(error.to_string().contains("it holds `file`"), "{error}");
    assert_eq!(error.exit(), Exit::BadInput);
    assert_eq!(names_in(dir.path()).unwrap(), ["file"]);
    let mut allowed = config(dir.path());
    allowed.run.allow_other_files = true;
    RunShare::take(&Group::single(0), &allowed).unwrap();
    assert_eq!(fs::read_to_string(file).unwrap(), "x");
    // From now on it is a run's folder.
    take(dir.path()).unwrap();
}

#[test]
fn a_folder_of_an_older_version_gets_a_marker() {
    let dir = tempfile::tempdir().unwrap();
    fill(dir.path(), 7);
    fs::write(dir.path().join(names::LOCK), "").unwrap();
    fs::write(dir.path().join(names::CONFIG), "[run]\nseed = 1\n").unwrap();
    fs::create_dir(dir.path().join(ASSETS)).unwrap();
    let share = take(dir.path()).unwrap();
    assert!(assets::is_ours(&dir.path().join(ASSETS)));
    assert_eq!(folder(&share).write_config("[run]\nseed = 2\n").unwrap(), names::CONFIG);
    assert_eq!(Marker::read(dir.path()).unwrap().unwrap().run_id, share.id);
}

#[test]
fn a_folder_that_was_removed_or_taken_by_another_run_is_not_written_to() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let first = take(&run).unwrap();
    fs::remove_dir_all(&run).unwrap();
    let lost = |share: &RunShare| folder(share).write(METRICS, b"x").unwrap_err();
    let error = lost(&first);
    assert!(error.to_string().contains("it was removed"), "{error}");
    assert_eq!(error.exit(), Exit::Failed);
    assert!(first.check().is_err() && !run.exists(), "it is not made anew");

    let second = take(&run).unwrap();
    assert_ne!(first.id, second.id);
    assert!(lost(&first).to_string().contains("another run was started there"));
    assert!(first.check().is_err());
    second.check().unwrap();
    assert!(!run.join(METRICS).exists());
    // The marker alone tells, too.
    Marker::new().unwrap().write(&run).unwrap();
    assert!(second.check().unwrap_err().contains("was started there"));
}

#[test]
fn what_fresh_sets_aside_is_a_runs_folder_until_there_is_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let old = take(dir.path()).unwrap();
    folder(&old).write_config("[run]\n").unwrap();
    fill(dir.path(), 7);
    fs::write(dir.path().join(CHECKPOINTS).join("notes"), "mine").unwrap();
    let old_id = old.id.clone();
    let new = anew(old, dir.path());
    assert_ne!(new.id, old_id);
    let [aside] = &folder(&new).set_aside()[..] else { panic!("one was set aside") };
    assert_eq!(Marker::read(aside).unwrap().unwrap().run_id, old_id);
    let kept = aside.join("checkpoints/step-00000007/weights");
    assert_eq!(fs::read_to_string(&kept).unwrap(), "years");
    assert!(aside.join(METRICS).is_file() && aside.join(names::CONFIG).is_file());
    assert_eq!(names_in(&dir.path().join(CHECKPOINTS)).unwrap(), ["notes"]);

    // A start that was killed before its first checkpoint loses nothing, nor does another --fresh.
    drop(new);
    let again = anew(take(dir.path()).unwrap(), dir.path());
    assert_eq!(folder(&again).set_aside(), std::slice::from_ref(aside));
    assert!(kept.is_file());
    folder(&again).discard_set_aside();
    assert!(!aside.exists());
    drop(again);
    assert!(folder(&take(dir.path()).unwrap()).set_aside().is_empty());
    assert_eq!(fs::read_to_string(dir.path().join("checkpoints/notes")).unwrap(), "mine");
}

#[test]
fn checkpoints_behind_a_link_stay_on_their_disk() {
    let dir = tempfile::tempdir().unwrap();
    let [run, disk] = ["run", "disk"].map(|name| dir.path().join(name));
    fs::create_dir(&disk).unwrap();
    drop(take(&run).unwrap());
    fs::remove_dir(run.join(CHECKPOINTS)).unwrap();
    std::os::unix::fs::symlink(&disk, run.join(CHECKPOINTS)).unwrap();
    fill(&run, 7);
    let new = anew(take(&run).unwrap(), &run);
    let [aside] = &folder(&new).set_aside()[..] else { panic!("one was set aside") };
    assert!(aside.join("checkpoints/step-00000007/weights").is_file());
    assert_eq!(names_in(&disk).unwrap().len(), 1, "and no step");
    folder(&new).discard_set_aside();
    assert!(names_in(&disk).unwrap().is_empty() && !aside.exists());
}

#[test]
fn a_fresh_start_that_was_killed_half_way_is_undone() {
    let dir = tempfile::tempdir().unwrap();
    drop(take(dir.path()).unwrap());
    fill(dir.path(), 7);
    fill(dir.path(), 9);
    let moving = dir.path().join("before-2026.moving");
    fs::create_dir_all(moving.join(CHECKPOINTS)).unwrap();
    let step = |folder: &Path| folder.join("checkpoints/step-00000007");
    fs::rename(step(dir.path()), step(&moving)).unwrap();
    fs::copy(dir.path().join(METRICS), moving.join(METRICS)).unwrap();
    drop(take(dir.path()).unwrap());
    assert!(step(dir.path()).join("weights").is_file() && !moving.exists());
}

#[test]
fn other_files_in_what_was_set_aside_stay() {
    let dir = tempfile::tempdir().unwrap();
    let old = take(dir.path()).unwrap();
    fill(dir.path(), 7);
    let new = anew(old, dir.path());
    let aside = folder(&new).set_aside().remove(0);
    fs::write(aside.join("thesis"), "years").unwrap();
    folder(&new).discard_set_aside();
    assert_eq!(names_in(&aside).unwrap(), ["thesis"]);
}

#[test]
fn fresh_does_not_begin_from_what_it_would_discard() {
    let dir = tempfile::tempdir().unwrap();
    drop(take(dir.path()).unwrap());
    fill(dir.path(), 7);
    fs::create_dir(dir.path().join("model")).unwrap();
    for (init, is_refused) in [("", true), ("checkpoints/step-00000007", true), ("model", false)] {
        let mut config = config(dir.path());
        config.model.init = Some(dir.path().join(init).display().to_string());
        check_before_start(&config, false).unwrap();
        let result = check_before_start(&config, true);
        assert_eq!(result.is_err(), is_refused, "{init}");
        if let Err(error) = result {
            assert!(error.to_string().contains("which --fresh would discard"), "{error}");
        }
    }
}
