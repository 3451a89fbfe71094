//! Runs that were trained with a key that a later version removed.

use std::fs;

use rstest::rstest;
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use megaburn_test_support::run::Run;

use crate::{
    config::refused::assert_refused,
    runs::changed_settings::{assert_done, resume, start},
};

/// Makes a run look as if an earlier version had trained it: adds the key to `config.toml` and to
/// the checkpoint.
fn add_removed_key(run: &Run, step: u64, is_set: bool) {
    let path = run.path("run/config.toml");
    let config = fs::read_to_string(&path).unwrap();
    let (first_line, config) = config.split_once('\n').unwrap();
    let section = format!("[parallel]\noverlap_moe = {is_set}\n");
    let config = config.replace("[parallel]\n", &section);
    assert!(config.contains(&section), "{config}");
    let (signature, _) = first_line.rsplit_once(' ').unwrap();
    let hash = xxh3_64(config.as_bytes());
    fs::write(&path, format!("{signature} {hash:016x}\n{config}")).unwrap();

    let checkpoint = run.checkpoints().join(format!("step-{step:08}"));
    let path = checkpoint.join("manifest.json");
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let parallel = manifest["trainer"]["config"]["parallel"].as_object_mut();
    parallel
        .unwrap()
        .insert("overlap_moe".into(), is_set.into());
    let manifest = manifest.to_string();
    fs::write(path, &manifest).unwrap();
    let hash = format!("{:016x}", xxh3_64(manifest.as_bytes()));
    fs::write(checkpoint.join("manifest.xxh3"), hash).unwrap();
}

#[rstest]
fn a_run_that_was_trained_with_a_removed_key_is_resumed(
    #[values(true, false)] is_set: bool,
    #[values(true, false)] by_folder: bool,
) {
    let whole = Run::new();
    let run = Run::new();
    fs::copy(whole.path("text.txt"), run.path("text.txt")).unwrap();
    assert_done(&start(&whole, 4, &[]));
    assert_done(&start(&run, 2, &[]));
    add_removed_key(&run, 2, is_set);
    let ended = if by_folder {
        resume(&run, &["--steps", "4"])
    } else {
        start(&run, 4, &[])
    };
    let changed = ["changed  train.steps: 2 -> 4"];
    let lines = assert_done(&ended).lines();
    let found: Vec<&str> = lines.filter(|line| line.starts_with("changed ")).collect();
    assert_eq!(found, changed, "{ended:#?}");
    assert_eq!(whole.numbers(), run.numbers());
    assert_eq!(whole.tensors(4), run.tensors(4));
    let config = fs::read_to_string(run.path("run/config.toml")).unwrap();
    assert!(!config.contains("overlap_moe"), "{config}");

    let key = format!("parallel.overlap_moe={is_set}");
    let ended = resume(&run, &["--set", &key]);
    assert_refused(&ended, "is no longer supported: no step was faster with it");
}
