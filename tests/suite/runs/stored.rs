//! Runs whose checkpoints are also uploaded to a folder of objects.

use std::{collections::BTreeSet, fs, path::Path};

use megaburn_test_support::run::{Run, STEPS};
use rstest::rstest;
use serde_json::Value;

use crate::runs::child::{Ended, Ranks};

/// The setting that uploads to the folder `store` of a run.
fn store(run: &Run) -> String {
    let path = run.path("store");
    format!("train.checkpoint_store=file://{}", path.display())
}

/// Ends a run of threads, which must exit with `code`.
fn ends(args: &[String], code: i32) -> Ended {
    let ended = Ranks::threads(args).wait_all().remove(0);
    assert_eq!(ended.code, Some(code), "{ended:#?}");
    ended
}

/// The steps of the complete checkpoints in the store.
fn stored(run: &Run) -> BTreeSet<u64> {
    let folders = fs::read_dir(run.path("store")).unwrap();
    let paths = folders.map(|folder| folder.unwrap().path());
    let complete = paths.filter(|path| path.join("manifest.json").is_file());
    complete.map(|path| step_of(&path)).collect()
}

fn step_of(path: &Path) -> u64 {
    let name = path.file_name().unwrap().to_str().unwrap();
    name.strip_prefix("step-").unwrap().parse().unwrap()
}

/// The lines of uploads in the metrics.
fn uploads(run: &Run) -> Vec<Value> {
    let text = fs::read_to_string(run.path("run/metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    let is_upload = |line: &Value| line.get("stored_checkpoint").is_some();
    lines.filter(is_upload).collect()
}

#[rstest]
fn a_run_that_loses_its_folder_continues_from_the_store_to_the_bit(
    #[values("false", "true")] is_async: &str,
) {
    let is_async = format!("train.async_save={is_async}");
    let whole = Run::new();
    Ranks::threads(&whole.args("dp2", STEPS, &[&is_async])).finish();
    let run = Run::new();
    let store = store(&run);
    let keep = "train.keep_stored_checkpoints=1";
    let sets = [&store, &is_async, keep, "train.checkpoint_interval=3"];
    ends(&run.args("dp2", STEPS / 2, &sets), 0);
    assert_eq!(stored(&run), [STEPS / 2].into());
    let last = uploads(&run).pop().unwrap();
    assert_eq!(last["stored_checkpoint"], STEPS / 2);
    let local = run.checkpoints().join(format!("step-{:08}", STEPS / 2));
    let url = format!(
        "file://{}/step-{:08}",
        run.path("store").display(),
        STEPS / 2
    );
    assert_eq!(last["url"], url.as_str());
    let files = fs::read_dir(&local).unwrap();
    let bytes: u64 = files
        .map(|file| file.unwrap().metadata().unwrap().len())
        .sum();
    assert_eq!(last["bytes"], bytes);
    assert!(last["seconds"].as_f64().unwrap() > 0.0);

    // The commands that look into a store, and copy from it.
    let folder = format!("file://{}", run.path("store").display());
    let listed = Ranks::command(&["checkpoint", "ls", "--json", &folder]).finish();
    let listed: Value = serde_json::from_str(&listed[0].stdout).unwrap();
    assert_eq!(
        (&listed["path"], &listed["step"]),
        (&url.as_str().into(), &(STEPS / 2).into())
    );
    assert_eq!(
        (&listed["state"], &listed["layout"]),
        (&"whole".into(), &"dp2".into())
    );
    let copy = run.path("copy").display().to_string();
    Ranks::command(&["checkpoint", "fetch", &url, &copy]).finish();
    let diff = ["checkpoint", "diff", &copy, &local.display().to_string()];
    Ranks::command(&diff).finish();

    fs::remove_dir_all(run.path("run")).unwrap();
    let ended = ends(&run.args("dp2", STEPS, &sets), 0);
    assert!(
        ended
            .stderr
            .contains(&format!("has no checkpoint: {url} is copied there")),
        "{}",
        ended.stderr
    );
    assert_eq!(whole.numbers()[(STEPS / 2) as usize..], run.numbers());
    assert_eq!(whole.tensors(STEPS), run.tensors(STEPS));
    assert!(run.path("run/hf").is_dir());
    assert_eq!(stored(&run), [STEPS].into());
    // It is the same run, so it starts again, and uploads nothing.
    let num_uploads = uploads(&run).len();
    ends(&run.args("dp2", STEPS, &sets), 0);
    assert_eq!(uploads(&run).len(), num_uploads);
}

#[test]
fn a_store_with_checkpoints_of_another_run_is_refused() {
    let (one, other) = (Run::new(), Run::new());
    let store = store(&one);
    ends(&one.args("tp1", 2, &[&store]), 0);
    ends(&other.args("tp1", 2, &[]), 0);
    let before = other.numbers();
    let ended = ends(&other.args("tp1", 4, &[&store]), 2);
    let url = one.path("store").display().to_string();
    for text in [
        &format!("`train.checkpoint_store` is `file://{url}`"),
        "holds checkpoints of run",
        "choose another prefix, or start in an empty run.dir to continue run",
    ] {
        assert!(ended.stderr.contains(text), "{text}: {}", ended.stderr);
    }
    let mut args = one.args("tp1", 4, &[&store]);
    args.push("--fresh".into());
    let ended = ends(&args, 2);
    assert!(
        ended.stderr.contains("and --fresh begins another run"),
        "{}",
        ended.stderr
    );
    assert_eq!(stored(&one), [2].into());
    assert_eq!((other.numbers(), one.numbers()), (before.clone(), before));
    let ended = ends(
        &one.args("tp1", 4, &["train.checkpoint_store=runs/store"]),
        2,
    );
    assert!(
        ended.stderr.contains("`runs/store` is not the URL of"),
        "{}",
        ended.stderr
    );
}

/// Objects that no run has marked are not replaced, so the uploads of their steps fail.
#[test]
fn an_upload_that_fails_is_a_warning_and_the_last_one_an_error() {
    let run = Run::new();
    let sets = [&store(&run), "train.checkpoint_interval=2"];
    let foreign = |step: u64| run.path(&format!("store/step-{step:08}/rank-00000.safetensors"));
    for step in [2, 8] {
        fs::create_dir_all(foreign(step).parent().unwrap()).unwrap();
        fs::write(foreign(step), "mine").unwrap();
    }
    let ended = ends(&run.args("dp2", 8, &sets), 1);
    let lost = |step: u64| format!("the checkpoint of step {step} was not uploaded to `file://");
    for text in [
        &lost(2),
        &lost(8),
        "has objects that megaburn did not write",
    ] {
        assert!(ended.stderr.contains(text), "{text}: {}", ended.stderr);
    }
    assert!(
        ended
            .stderr
            .contains("; training continues, and the next checkpoint is uploaded"),
        "{}",
        ended.stderr
    );
    assert_eq!(run.steps().len(), 8);
    assert!(
        run.checkpoints()
            .join("step-00000008/manifest.json")
            .is_file()
    );
    assert!(
        [2, 8]
            .iter()
            .all(|step| fs::read(foreign(*step)).unwrap() == b"mine")
    );
    // The next start uploads what is missing.
    fs::remove_dir_all(run.path("store/step-00000008")).unwrap();
    ends(&run.args("dp2", 8, &sets), 0);
    assert!(stored(&run).contains(&8));
}

/// A store whose checkpoint was copied without its mark is one of the run that the manifest names.
#[test]
fn a_run_that_loses_its_folder_continues_from_a_checkpoint_without_a_mark() {
    let run = Run::new();
    let store = store(&run);
    ends(&run.args("tp1", 2, &[&store]), 0);
    let folder = run.path("store/step-00000002");
    for file in fs::read_dir(&folder).unwrap() {
        let path = file.unwrap().path();
        if path.extension().unwrap() == "owner" {
            fs::remove_file(path).unwrap();
        }
    }
    fs::remove_dir_all(run.path("run")).unwrap();
    ends(&run.args("tp1", 4, &[&store]), 0);
    let steps: Vec<u64> = run.steps().iter().map(|step| step.step).collect();
    assert_eq!(steps, [3, 4]);
    assert_eq!(stored(&run), [2, 4].into());
}

/// The last checkpoint is saved before the evaluation of its step, so only the metrics have the
/// loss.
#[test]
fn a_restart_keeps_the_best_checkpoints_in_the_store() {
    let run = Run::new();
    let sets = [
        &store(&run),
        "train.checkpoint_interval=2",
        "train.eval_interval=2",
        "train.keep_stored_checkpoints=1",
        "train.keep_best_checkpoints=1",
    ];
    // Each run waits for its upload, so none is left out.
    for steps in [2, 4, 6] {
        ends(&run.args("dp2", steps, &sets), 0);
    }
    let text = fs::read_to_string(run.path("run/metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    let loss = |line: Value| Some((line["eval_loss"].as_f64()?, line["step"].as_u64()?));
    let losses: Vec<_> = lines.filter_map(loss).collect();
    let best_of = |last| {
        let known = losses.iter().filter(|(_, step)| *step <= last);
        known.min_by(|a, b| a.0.total_cmp(&b.0)).unwrap().1
    };
    assert_eq!(stored(&run), [best_of(4), 6].into());
    // The upload of the last checkpoint is lost, and the next start repeats it.
    fs::remove_file(run.path("store/step-00000006/manifest.json")).unwrap();
    ends(&run.args("dp2", 6, &sets), 0);
    assert_eq!(stored(&run), [best_of(6), 6].into());
}

#[test]
fn a_run_ends_if_another_start_of_it_has_taken_over_the_store() {
    let run = Run::new();
    let sets = [
        &store(&run),
        "train.checkpoint_interval=2",
        "train.keep_stored_checkpoints=0",
    ];
    let mut ranks = Ranks::threads(&run.args("dp2", 100_000, &sets));
    let start = || {
        let listed = fs::read_dir(run.path("store")).ok()?;
        let mut paths = listed.filter_map(|entry| Some(entry.ok()?.path()));
        paths.find(|path| path.extension().is_some_and(|end| end == "start"))
    };
    ranks.wait_until(|| start().is_some() && !stored(&run).is_empty());
    fs::write(start().unwrap(), "another").unwrap();
    let before = stored(&run);
    let ended = ranks.wait_all().remove(0);
    assert_eq!(ended.code, Some(1), "{ended:#?}");
    let expected = "another start of this run has taken over";
    assert!(ended.stderr.contains(expected), "{}", ended.stderr);
    assert!(stored(&run).is_superset(&before));
}
