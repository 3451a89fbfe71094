//! `megaburn info`: runs, checkpoints and models.

use std::path::Path;

use megaburn_test_support::run::Run;
use serde_json::Value;

use crate::runs::child::{Ended, Ranks};

fn info(path: &Path, json: bool) -> Ended {
    let path = path.display().to_string();
    let mut args = vec!["info", &path];
    args.extend(json.then_some("--json"));
    Ranks::command(&args).wait_all().remove(0)
}

fn found(path: &Path) -> Value {
    let ended = info(path, true);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    serde_json::from_str(&ended.stdout).unwrap()
}

#[test]
fn a_run_and_its_checkpoints_are_described() {
    let run = Run::new();
    let sets = ["train.checkpoint_interval=4", "train.dtype=bf16"];
    Ranks::threads(&run.args("tp2-dp2-sp", 8, &sets)).finish();
    let of_run = found(&run.path("run"));
    let last = run.steps().pop().unwrap();
    assert_eq!(of_run["kind"], "run");
    assert_eq!(of_run["state"], "finished");
    assert_eq!((&of_run["step"], &of_run["steps"]), (&8.into(), &8.into()));
    assert_eq!(of_run["loss"].as_f64(), Some(last.loss));
    assert_eq!(of_run["eval_step"], 8);
    assert_eq!(of_run["checkpoints"], serde_json::json!([4, 8]));
    assert_eq!(of_run["layout"], "tp2-dp2-sp");
    let parameters = of_run["parameters"].as_u64().unwrap();
    assert!(parameters > 10_000 && of_run["bytes"].as_u64().unwrap() > 12 * parameters);

    let checkpoint = found(&run.checkpoints().join("step-00000004"));
    assert_eq!(checkpoint["kind"], "checkpoint");
    assert_eq!(checkpoint["step"], 4);
    assert_eq!(checkpoint["parameters"], parameters);
    assert_eq!(checkpoint["dtypes"], serde_json::json!(["f32"]), "masters");
    assert_eq!(checkpoint["run_id"], of_run["run_id"]);
    assert_eq!(found(&run.checkpoints())["step"], 8);

    let text = info(&run.path("run"), false).stdout;
    for line in [
        "run      ",
        "state    finished",
        "step     8 of 8, loss ",
        "saved    steps 4, 8",
    ] {
        assert!(text.contains(line), "{text}");
    }
}

#[test]
fn a_model_of_hugging_face_is_described() {
    let fixtures = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures"));
    let model = found(&fixtures.join("deepseek-v2"));
    assert_eq!(model["kind"], "model");
    assert!(
        model["model"]
            .as_str()
            .unwrap()
            .starts_with("deepseek_v2, "),
        "{model}"
    );
    assert!(model["parameters"].as_u64().unwrap() > 1000);
    assert_eq!(model["step"], Value::Null);
}

#[test]
fn other_paths_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (path, why) in [
        (dir.path().to_path_buf(), "contains neither manifest.json"),
        (dir.path().join("nowhere"), "is not a folder"),
    ] {
        let ended = info(&path, false);
        assert_eq!(ended.code, Some(2), "{ended:?}");
        assert!(ended.stderr.contains(why), "{ended:?}");
    }
}
