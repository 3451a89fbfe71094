//! A Burn user's own crate, outside the workspace, with Burn's default features.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

/// The manifest of a user's program. `ROOT` is replaced by the path of this repository.
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

/// Compiles Burn a second time, with other features: minutes in the first run, seconds afterwards.
#[test]
fn a_crate_of_ones_own_with_burns_default_features_trains_in_parallel() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let here = dir.path();
    let manifest = MANIFEST.replace("ROOT", &root.display().to_string());
    fs::write(here.join("Cargo.toml"), manifest).unwrap();
    // Use the lock file of the workspace, so that the same crates are used, which are already
    // downloaded.
    fs::copy(root.join("Cargo.lock"), here.join("Cargo.lock")).unwrap();
    fs::create_dir(here.join("src")).unwrap();
    fs::copy(
        root.join("examples/parallel_linear.rs"),
        here.join("src/main.rs"),
    )
    .unwrap();

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
    let ranks: Vec<Rank> = stdout.lines().map(Rank::parse).collect();
    let world_sizes: Vec<usize> = ranks.iter().map(|rank| rank.world_size).collect();
    assert_eq!(world_sizes, [1, 2, 2, 4, 4, 4, 4], "{stdout}");
    let one_rank = ranks[0].last_loss;
    assert!(
        one_rank < 0.5 * ranks[0].first_loss,
        "it does not learn: {stdout}"
    );
    for rank in &ranks {
        assert!(
            (rank.last_loss - one_rank).abs() <= 1e-4 * one_rank,
            "{stdout}"
        );
    }
}

/// A line that the program prints.
struct Rank {
    world_size: usize,
    first_loss: f32,
    last_loss: f32,
}

impl Rank {
    /// Reads `rank 0 of 2: loss 0.3 -> 0.1`.
    fn parse(line: &str) -> Self {
        let (rank, losses) = line.split_once(": loss ").unwrap();
        let (_, world_size) = rank.split_once(" of ").unwrap();
        let (first_loss, last_loss) = losses.split_once(" -> ").unwrap();
        Self {
            world_size: world_size.parse().unwrap(),
            first_loss: first_loss.parse().unwrap(),
            last_loss: last_loss.parse().unwrap(),
        }
    }
}
