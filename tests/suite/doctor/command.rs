//! `megaburn doctor` on the command line, alone and on ranks.

use std::net::TcpListener;

use serde_json::Value;

use crate::runs::child::{Ended, Ranks};

fn alone(args: &[&str]) -> Ended {
    Ranks::command(&[&["doctor", "--quick"], args].concat())
        .wait_all()
        .remove(0)
}

fn findings(json: &Value) -> Vec<&str> {
    let all = json["observations"].as_array().unwrap().iter();
    all.filter(|found| found["kind"] == "finding")
        .map(|found| found["check"].as_str().unwrap())
        .collect()
}

#[test]
fn a_process_alone_says_what_it_looked_at_and_what_not() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().to_str().unwrap();
    let ended = alone(&["--folder", folder]);
    let text = &ended.stdout;
    for line in [
        "ranks    1 rank: ",
        "ok       program",
        "ok       ports",
        "ok       bandwidth",
        "skipped  GPUs and NVIDIA's libraries: this program was built without the feature `cuda`",
        "result   ",
    ] {
        assert!(text.contains(line), "{line} is not in:\n{text}");
    }
    assert_eq!(
        ended.code,
        Some(if text.contains("FINDING") { 1 } else { 0 }),
        "{ended:?}"
    );
    assert_eq!(ended.stderr, "");
}

#[test]
fn ranks_under_a_launcher_print_one_object_and_exit_alike() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().to_str().unwrap();
    let args = ["doctor", "--quick", "--json", "--folder", folder];
    let ended = Ranks::commands(2, &args).wait_all();
    assert_eq!(ended[0].code, ended[1].code, "{ended:?}");
    assert_eq!(ended[1].stdout, "");
    let json: Value = serde_json::from_str(&ended[0].stdout).unwrap();
    assert_eq!(json["num_ranks"], 2);
    assert_eq!(json["is_well"], findings(&json).is_empty());
    assert_eq!(ended[0].code == Some(0), findings(&json).is_empty());
    let bandwidths = json["ranks"][1]["bandwidths"].as_array().unwrap();
    assert_eq!(bandwidths[0]["members"], serde_json::json!([0, 1]));
    assert!(bandwidths[0]["bytes_per_second"].as_f64().unwrap() > 1e6);
    assert_eq!(json["ranks"][0]["folder"]["unseen"], serde_json::json!([]));
}

#[test]
fn ranks_that_do_not_meet_are_a_finding() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = port.local_addr().unwrap().port().to_string();
    let env = [
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", &taken),
    ];
    let env = env.map(|(name, value)| format!("{name}={value}"));
    let program = env!("CARGO_BIN_EXE_megaburn-under-test");
    let script = format!("{} {program} doctor --json --timeout 1", env.join(" "));
    let ended = Ranks::shell(&script, std::path::Path::new("/tmp"))
        .wait_all()
        .remove(0);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let json: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(findings(&json), ["ports"], "{json}");
    assert!(
        json["observations"][0]["value"]
            .as_str()
            .unwrap()
            .contains("is in use")
    );
    drop(port);
}

#[test]
fn gpus_that_are_asked_for_and_cannot_be_used_are_a_finding() {
    let ended = alone(&["--device", "cuda"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(
        ended
            .stdout
            .contains("build the program with `--features cuda`"),
        "{ended:?}"
    );
}

#[test]
fn a_configuration_names_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("run.toml");
    let dir = folder.path().join("runs/x");
    std::fs::write(&config, format!("[run]\ndir = {dir:?}\n")).unwrap();
    let config = config.to_str().unwrap();
    let ended = alone(&["--config", config, "--json"]);
    let json: Value = serde_json::from_str(&ended.stdout).unwrap();
    // The folder of the run does not exist yet.
    let path = json["ranks"][0]["folder"]["path"].as_str().unwrap();
    assert_eq!(path, folder.path().to_str().unwrap(), "{json}");
    let ended = alone(&["--config", config, "--folder", "/tmp"]);
    assert_eq!(ended.code, Some(2), "{ended:?}");
}
