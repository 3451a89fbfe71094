//! A Burn user's own crate, outside the workspace, with Burn's default features.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

/// What a user writes beside their program. `ROOT` stands for this repository.
const MANIFEST: &str = r#"
[package]
name = "outside"
version = "0.1.0"
edition = "2024"

[dependencies]
burn = { version = "0.22", features = ["flex"] }
megaburn = { path = "ROOT/crates/megaburn" }

[profile.dev]
debug = false
"#;

/// Compiles Burn once more, with other features: minutes in the first run, seconds afterwards.
#[test]
fn a_crate_of_ones_own_with_burns_default_features_trains_in_parallel() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let here = dir.path();
    let manifest = MANIFEST.replace("ROOT", &root.display().to_string());
    fs::write(here.join("Cargo.toml"), manifest).unwrap();
    // The versions of the workspace, where it has one: the same crates, already downloaded.
    fs::copy(root.join("Cargo.lock"), here.join("Cargo.lock")).unwrap();
    fs::create_dir(here.join("src")).unwrap();
    fs::copy(root.join("examples/parallel_linear.rs"), here.join("src/main.rs")).unwrap();

    let output = Command::new(env!("CARGO"))
        .args(["run", "--quiet"])
        .current_dir(here)
        .env("CARGO_TARGET_DIR", root.join("target/outside"))
        .env("RAYON_NUM_THREADS", "1")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");

    let stdout = String::from_utf8(output.stdout).unwrap();
    let losses: Vec<Vec<f32>> = stdout.lines().map(losses).collect();
    assert_eq!(losses.iter().map(Vec::len).collect::<Vec<_>>(), [1, 2, 4], "{stdout}");
    let one_rank = losses[0][0];
    assert!(one_rank < 0.1, "it learns: {stdout}");
    for loss in losses.concat() {
        assert!((loss - one_rank).abs() <= 1e-4 * one_rank, "{stdout}");
    }
}

/// The numbers of `2 rank(s): loss [0.1, 0.1]`.
fn losses(line: &str) -> Vec<f32> {
    let (_, list) = line.split_once("loss [").unwrap();
    list.trim_end_matches(']').split(", ").map(|loss| loss.parse().unwrap()).collect()
}
