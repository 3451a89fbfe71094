//! Profiles and statistics of layers of a task's run.

use std::fs;

use megaburn::{
    report::profile::{Summary, read_chrome},
    train::{signal::StopSignal, train_task},
};
use serde_json::Value;

use super::model::{WAVES, config};

#[test]
fn a_task_has_profiles_and_statistics_of_its_layers() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let run_dir = format!("run.dir={}", run.display());
    let sets = [
        run_dir.as_str(),
        "train.steps=4",
        "parallel.tp=2",
        "parallel.dp=2",
        "run.device=cpu",
        "profile.steps=\"2-3\"",
        "log.layer_statistics_interval=3",
    ];
    train_task(&WAVES, config(&sets).unwrap(), false, StopSignal::never()).unwrap();
    let trace = read_chrome(&run.join("profile/steps-2-3.trace.json")).unwrap();
    assert_eq!(trace.ranks.len(), 4);
    for rank in &Summary::of(&trace).ranks {
        let parts = [rank.host.forward, rank.host.backward, rank.host.update];
        assert!(parts.iter().all(|part| *part > 0.0), "{rank:?}");
    }
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let lines = metrics
        .lines()
        .map(|line| serde_json::from_str(line).unwrap());
    let mut lines = lines.filter(|line: &Value| line.get("layer_statistics").is_some());
    let line = lines.next().unwrap();
    assert!(
        lines.next().is_none() && line["layer_statistics"] == 3,
        "{line}"
    );
    let layers = line["layers"].as_array().unwrap();
    assert!(
        layers.iter().any(|layer| layer["layer"] == "blocks.1"),
        "{line}"
    );
    for layer in layers {
        assert!(layer.get("activations").is_none(), "{layer}");
        assert!(layer["weights"]["norm"].as_f64().unwrap() > 0.0, "{layer}");
    }
}
