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
        ended.stderr.contains("; training continues"),
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
