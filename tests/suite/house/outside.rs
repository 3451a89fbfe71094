//! A Burn user's own crate, outside the workspace: that of `examples/own_family`, which also gets the
//! programs `examples/parallel_linear.rs`, `examples/parallelize.rs`, `examples/own_model.rs` and those
//! of `examples/learner` and `examples/ports`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
};

use toml::{Table, Value};

/// The crates whose code is compiled a second time, by the beginning of their names.
const COMPILED_AGAIN: &str = "megaburn";

/// Dependencies of many crates, with the features that tests of the workspace enable. A crate is
/// compiled once for two workspaces only where it has the same features in both.
const SHARED: &str = r#"
crc32fast = "1"
flate2 = { version = "1", default-features = false, features = ["rust_backend", "zlib-rs"] }
indexmap = "2"
log = { version = "0.4", features = ["std"] }
memchr = "2"
toml = "1"
toml_datetime = { version = "1", features = ["serde"] }
toml_parser = "1"
tracing-subscriber = "0.3"
winnow = "1"
"#;

/// Builds the crate at the first call, and returns the path of one of its programs. This compiles
/// megaburn a second time: a minute in the first run, seconds afterwards.
pub(crate) fn program(name: &str) -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(build).join(name)
}

/// Builds the crate, and returns the folder of its programs.
fn build() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let here = dir.path();
    fs::write(here.join("Cargo.toml"), manifest(root)).unwrap();
    // Use the lock file of the workspace, so that the same crates are used, which are already
    // downloaded.
    fs::copy(root.join("Cargo.lock"), here.join("Cargo.lock")).unwrap();
    fs::create_dir_all(here.join("src/bin/ports")).unwrap();
    for file in fs::read_dir(root.join("examples/ports/src")).unwrap() {
        let file = file.unwrap();
        let to = here.join("src/bin/ports").join(file.file_name());
        fs::copy(file.path(), to).unwrap();
    }
    for (from, to) in [
        ("own_family/src/main.rs", "main.rs"),
        ("own_model.rs", "bin/own_model.rs"),
        ("parallel_linear.rs", "bin/parallel_linear.rs"),
        ("parallelize.rs", "bin/parallelize.rs"),
        ("learner/src/one_device.rs", "bin/one_device.rs"),
        ("learner/src/parallel.rs", "bin/parallel.rs"),
    ] {
        fs::copy(root.join("examples").join(from), here.join("src").join(to)).unwrap();
    }
    // The folder that this test was built in, so that crates which are the same are there already.
    let programs = Path::new(env!("CARGO_BIN_EXE_megaburn-under-test"))
        .parent()
        .unwrap();
    let target = programs.parent().unwrap();
    let output = Command::new(env!("CARGO"))
        .args(["build", "--quiet"])
        .current_dir(here)
        .env("CARGO_TARGET_DIR", target)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    target.join("debug")
}

/// The manifest of `examples/own_family` with the profile of the workspace, without which no crate
/// would be the same. What is compiled again is not optimised, because that takes longer than the
/// programs run.
fn manifest(root: &Path) -> String {
    let read = |name: &str| -> Table {
        let text = fs::read_to_string(root.join(name)).unwrap();
        text.replace("../..", &root.display().to_string())
            .parse()
            .unwrap()
    };
    let mut manifest = read("examples/own_family/Cargo.toml");
    let mut workspace = read("Cargo.toml");
    let mut profile = workspace.remove("profile").unwrap();
    let packages = profile["dev"]["package"].as_table_mut().unwrap();
    for package in read("Cargo.lock")["package"].as_array().unwrap() {
        let name = package["name"].as_str().unwrap();
        if name.starts_with(COMPILED_AGAIN) {
            packages.insert(name.to_owned(), toml::toml! { opt-level = 0 }.into());
        }
    }
    manifest.insert("profile".to_owned(), profile);
    let dependencies = manifest["dependencies"].as_table_mut().unwrap();
    // With Burn's default features its Learner also draws a dashboard, for which Burn and 60 crates
    // would be compiled a second time.
    let burn = workspace["workspace"]["dependencies"]["burn"].clone();
    dependencies.insert("burn".to_owned(), burn);
    for other in ["examples/learner/Cargo.toml", "examples/ports/Cargo.toml"] {
        add_features(dependencies, &read(other));
    }
    dependencies.extend(SHARED.parse::<Table>().unwrap());
    manifest.to_string()
}

/// Adds the features that another manifest enables of dependencies that both have.
fn add_features(dependencies: &mut Table, other: &Table) {
    for (name, of_other) in other["dependencies"].as_table().unwrap() {
        let dependency = dependencies[name].as_table_mut().unwrap();
        let features = dependency
            .entry("features")
            .or_insert(Value::Array(Vec::new()));
        let features = features.as_array_mut().unwrap();
        for feature in of_other["features"].as_array().unwrap() {
            if !features.contains(feature) {
                features.push(feature.clone());
            }
        }
    }
}

#[test]
fn a_crate_of_ones_own_trains_in_parallel() {
    let (ranks, stdout) = ranks_of("parallel_linear");
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

#[test]
fn a_model_of_burns_layers_trains_on_ranks_as_on_one() {
    let (ranks, stdout) = ranks_of("parallelize");
    let [trained, adapted] = [ranks[0].first_loss, ranks[0].last_loss];
    // The loss of ten tokens begins at ln 10, which is 2.3.
    assert!(
        trained < 1.5 && adapted < trained,
        "it does not learn: {stdout}"
    );
    for rank in &ranks {
        assert!((rank.first_loss - trained).abs() <= 1e-3, "{stdout}");
        assert!((rank.last_loss - adapted).abs() <= 1e-3, "{stdout}");
    }
}

/// Runs a program on 1, 2 and 4 ranks, and returns what it prints.
fn ranks_of(name: &str) -> (Vec<Rank>, String) {
    let output = Command::new(program(name))
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
    (ranks, stdout)
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
