use std::sync::atomic::AtomicBool;

use megaburn_collective::Progress;
use megaburn_models::assets::ASSETS;
use megaburn_report::metrics::{Journal, MetricsWriter, StepMetrics, read_metrics};

use super::*;
use crate::{
    config::ConfigLayers,
    exit::Exit,
    run_folder::names::{METRICS, STATE},
};

fn config(dir: &Path) -> TrainConfig {
    let mut config = ConfigLayers::new().load().unwrap();
    config.run.dir = dir.display().to_string();
    config
}

pub(super) fn take(dir: &Path) -> Result<RunShare, TrainError> {
    RunShare::take(&Group::single(0), &config(dir))
}

pub(super) fn anew(share: RunShare, dir: &Path) -> RunShare {
    share.begin_anew(&Group::single(0), &config(dir)).unwrap()
}

pub(super) fn folder(share: &RunShare) -> &RunFolder {
    share.folder.as_ref().unwrap()
}

/// Removes everything that was set aside.
pub(super) fn discard_all(share: &RunShare) {
    folder(share).discard_set_aside(&AtomicBool::new(false), &Progress::none());
}

/// The metrics of a step.
fn first_step() -> StepMetrics {
    StepMetrics {
        step: 1,
        loss: 1.0,
        ..StepMetrics::default()
    }
}

/// Creates the files of a checkpoint of the run `id`.
fn put(dir: &Path, step: u64, id: &str) -> PathBuf {
    let step = dir.join(CHECKPOINTS).join(format!("step-{step:08}"));
    fs::create_dir_all(&step).unwrap();
    fs::write(step.join("weights"), "years").unwrap();
    fs::write(
        step.join("manifest.json"),
        format!("{{\"run_id\":\"{id}\"}}"),
    )
    .unwrap();
    step
}

/// Creates a checkpoint and metrics.
pub(super) fn fill(dir: &Path, step: u64, id: &str) {
    put(dir, step, id);
    let line = serde_json::to_string(&first_step()).unwrap();
    fs::write(dir.join(METRICS), line + "\n").unwrap();
}

#[test]
fn a_run_keeps_its_id_and_a_folder_is_no_other_runs() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("a/b");
    let first = take(&run).unwrap();
    assert!(
        take(&run)
            .unwrap_err()
            .to_string()
            .contains("is in use by a run")
    );
    let id = first.id.clone();
    drop(first);
    let again = take(&run).unwrap();
    assert_eq!(again.id, id);
    again.check().unwrap();
    assert!(
        fs::read_to_string(run.join(names::LOCK))
            .unwrap()
            .contains(&id)
    );
}

#[test]
fn a_file_is_no_folder_and_other_files_are_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    let error = take(&file).unwrap_err();
    assert!(
        error.to_string().contains("cannot be the run's folder"),
        "{error}"
    );
    assert_eq!(error.exit(), Exit::BadInput);
    let error = take(dir.path()).unwrap_err();
    assert!(error.to_string().contains("it contains `file`"), "{error}");
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
fn a_folder_of_an_older_version_gets_a_marker_and_its_config_stays() {
    let dir = tempfile::tempdir().unwrap();
    fill(dir.path(), 7, "");
    let config = "[run]\nseed = 1\n";
    fs::write(dir.path().join(names::CONFIG), config).unwrap();
    fs::create_dir(dir.path().join(ASSETS)).unwrap();
    let share = take(dir.path()).unwrap();
    assert!(assets::is_ours(&dir.path().join(ASSETS)));
    let written = folder(&share).write_config("[run]\nseed = 2\n").unwrap();
    assert_eq!(written, names::RESOLVED_CONFIG);
    assert_eq!(
        fs::read_to_string(dir.path().join(names::CONFIG)).unwrap(),
        config
    );
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
    assert!(
        first.check().is_err() && !run.exists(),
        "it is not made anew"
    );

    let second = take(&run).unwrap();
    assert_ne!(first.id, second.id);
    assert!(
        lost(&first)
            .to_string()
            .contains("another run was started there")
    );
    assert!(first.check().is_err());
    second.check().unwrap();
    assert!(!run.join(METRICS).exists());
    // A different marker is enough.
    Marker::new().unwrap().write(&run).unwrap();
    assert!(second.check().unwrap_err().contains("was started there"));
}

#[test]
fn what_fresh_sets_aside_is_a_runs_folder_until_there_is_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let old = take(dir.path()).unwrap();
    folder(&old).write_config("[run]\n").unwrap();
    fill(dir.path(), 7, &old.id);
    fs::write(dir.path().join(STATE), "{}").unwrap();
    fs::write(dir.path().join(CHECKPOINTS).join("notes"), "mine").unwrap();
    let old_id = old.id.clone();
    let new = anew(old, dir.path());
    assert_ne!(new.id, old_id);
    let [aside] = &folder(&new).set_aside()[..] else {
        panic!("one was set aside")
    };
    assert_eq!(Marker::read(aside).unwrap().unwrap().run_id, old_id);
    let kept = aside.join("checkpoints/step-00000007/weights");
    assert_eq!(fs::read_to_string(&kept).unwrap(), "years");
    let expected = [
        "checkpoints",
        "config.toml",
        "metrics.jsonl",
        "run.json",
        "state.json",
    ];
    assert_eq!(names_in(aside).unwrap(), expected);
    assert_eq!(names_in(&dir.path().join(CHECKPOINTS)).unwrap(), ["notes"]);

    // Neither a start that was killed before its first checkpoint nor another --fresh loses
    // anything.
    drop(new);
    let again = anew(take(dir.path()).unwrap(), dir.path());
    assert_eq!(folder(&again).set_aside(), std::slice::from_ref(aside));
    assert!(kept.is_file());
    discard_all(&again);
    assert!(!aside.exists());
    drop(again);
    assert!(folder(&take(dir.path()).unwrap()).set_aside().is_empty());
    assert_eq!(
        fs::read_to_string(dir.path().join("checkpoints/notes")).unwrap(),
        "mine"
    );
}

#[test]
fn checkpoints_behind_a_link_stay_on_their_disk() {
    let dir = tempfile::tempdir().unwrap();
    let [run, disk] = ["run", "disk"].map(|name| dir.path().join(name));
    fs::create_dir(&disk).unwrap();
    let id = take(&run).unwrap().id;
    fs::remove_dir(run.join(CHECKPOINTS)).unwrap();
    std::os::unix::fs::symlink(&disk, run.join(CHECKPOINTS)).unwrap();
    fill(&run, 7, &id);
    let new = anew(take(&run).unwrap(), &run);
    let [aside] = &folder(&new).set_aside()[..] else {
        panic!("one was set aside")
    };
    assert!(aside.join("checkpoints/step-00000007/weights").is_file());
    assert_eq!(names_in(&disk).unwrap().len(), 1, "and no step");
    discard_all(&new);
    assert!(names_in(&disk).unwrap().is_empty() && !aside.exists());
}

#[test]
fn a_fresh_start_that_was_killed_half_way_is_undone() {
    let dir = tempfile::tempdir().unwrap();
    let old = take(dir.path()).unwrap();
    folder(&old).write_config("[run]\n").unwrap();
    for step in [7, 9] {
        fill(dir.path(), step, &old.id);
    }
    let before = names_in(dir.path()).unwrap();
    // The start was killed before the new run's marker was written.
    aside::set_aside(dir.path(), &folder(&old).held().marker)
        .unwrap()
        .unwrap();
    drop(old);
    let again = take(dir.path()).unwrap();
    assert_eq!(names_in(dir.path()).unwrap(), before);
    assert!(folder(&again).set_aside().is_empty());
    let steps = names_in(&dir.path().join(CHECKPOINTS)).unwrap();
    assert_eq!(steps, ["step-00000007", "step-00000009"]);
}

#[test]
fn a_fresh_start_that_was_killed_after_its_marker_is_brought_to_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let old = take(dir.path()).unwrap();
    fill(dir.path(), 7, &old.id);
    let new = anew(old, dir.path());
    let id = new.id.clone();
    let aside = folder(&new).set_aside().remove(0);
    drop(new);
    let mut moving = aside.clone().into_os_string();
    moving.push(".tmp-1f-2a");
    fs::rename(&aside, moving).unwrap();
    let again = take(dir.path()).unwrap();
    assert_eq!(
        (&again.id, folder(&again).set_aside()),
        (&id, vec![aside.clone()])
    );
    assert!(aside.join("checkpoints/step-00000007/weights").is_file());
}

#[test]
fn a_folder_that_only_has_such_a_name_stays() {
    let dir = tempfile::tempdir().unwrap();
    drop(take(dir.path()).unwrap());
    // A name that the user chose, a folder without a marker, and one of another run.
    let names = [
        "before-2026.moving",
        "before-2026.tmp-1-2",
        "before-2026.tmp-1-3",
    ];
    for name in names {
        fs::create_dir(dir.path().join(name)).unwrap();
        fs::write(dir.path().join(name).join(METRICS), "years").unwrap();
    }
    Marker::new()
        .unwrap()
        .write(&dir.path().join(names[2]))
        .unwrap();
    fs::create_dir(dir.path().join("before-2026.tmp-1-4")).unwrap();
    drop(take(dir.path()).unwrap());
    for name in names {
        assert_eq!(
            fs::read_to_string(dir.path().join(name).join(METRICS)).unwrap(),
            "years"
        );
    }
    assert!(
        !dir.path().join("before-2026.tmp-1-4").exists(),
        "a kill left it, and it is empty"
    );
}

#[test]
fn other_files_in_what_was_set_aside_stay() {
    let dir = tempfile::tempdir().unwrap();
    let old = take(dir.path()).unwrap();
    fill(dir.path(), 7, &old.id);
    put(dir.path(), 9, "another run");
    let new = anew(old, dir.path());
    let aside = folder(&new).set_aside().remove(0);
    fs::write(aside.join("thesis"), "years").unwrap();
    discard_all(&new);
    let steps = names_in(&aside.join(CHECKPOINTS)).unwrap();
    assert_eq!(steps, ["step-00000009"], "this run did not write it");
    assert_eq!(fs::read_to_string(aside.join("thesis")).unwrap(), "years");
}

#[test]
fn fresh_moves_nothing_where_somebodys_files_are_in_its_way() {
    let dir = tempfile::tempdir().unwrap();
    let old = take(dir.path()).unwrap();
    fill(dir.path(), 7, &old.id);
    let thesis = dir.path().join("hf/thesis");
    fs::create_dir(thesis.parent().unwrap()).unwrap();
    fs::write(&thesis, "years").unwrap();
    let before = names_in(dir.path()).unwrap();
    for error in [
        check_before_start(&config(dir.path()), true).unwrap_err(),
        old.begin_anew(&Group::single(0), &config(dir.path()))
            .unwrap_err(),
    ] {
        assert!(
            error
                .to_string()
                .contains("hf` was not written by megaburn"),
            "{error}"
        );
        assert_eq!(error.exit(), Exit::BadInput);
    }
    check_before_start(&config(dir.path()), false).unwrap();
    assert_eq!(names_in(dir.path()).unwrap(), before);
    assert!(dir.path().join("checkpoints/step-00000007").is_dir() && thesis.is_file());
}

#[test]
fn fresh_does_not_begin_from_what_it_would_discard() {
    let dir = tempfile::tempdir().unwrap();
    let id = take(dir.path()).unwrap().id;
    fill(dir.path(), 7, &id);
    fs::create_dir(dir.path().join("model")).unwrap();
    for (init, is_refused) in [
        ("", true),
        ("checkpoints/step-00000007", true),
        ("model", false),
    ] {
        let mut config = config(dir.path());
        config.model.init = Some(dir.path().join(init).display().to_string());
        check_before_start(&config, false).unwrap();
        let result = check_before_start(&config, true);
        assert_eq!(result.is_err(), is_refused, "{init}");
        if let Err(error) = result {
            assert!(
                error.to_string().contains("which --fresh would discard"),
                "{error}"
            );
        }
    }
}

fn journal(dir: &Path) -> Journal<TrainError> {
    let run = take(dir).unwrap();
    let writer = MetricsWriter::open(dir.join(METRICS), 0, &run.id).unwrap();
    let folder = run.folder.unwrap();
    Journal::new(writer, move || Ok(folder.check()?))
}

#[test]
fn no_metrics_are_written_into_another_runs_folder() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let mut first = journal(&run);
    fs::rename(&run, dir.path().join("gone")).unwrap();
    let _second = journal(&run);
    let error = first.write(first_step()).unwrap_err();
    assert!(
        error.to_string().contains("no longer owns its folder"),
        "{error}"
    );
    assert!(first.sync().is_err() && first.finish().is_err());
    assert_eq!(read_metrics(run.join(METRICS)).unwrap(), []);
}
