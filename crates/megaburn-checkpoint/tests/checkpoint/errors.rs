use std::{fs, path::Path};

use burn::tensor::DType;
use megaburn_checkpoint::{Checkpoint, CheckpointError, find_latest};
use megaburn_collective::{GroupOptions, run_threads};
use megaburn_mesh::{Axis, ShardSpec};
use tempfile::TempDir;
use xxhash_rust::xxh3::xxh3_64;

use crate::model::save_as;

fn opened() -> (TempDir, Checkpoint) {
    let dir = tempfile::tempdir().unwrap();
    let path = save_as(dir.path(), 1, 7, "tp2");
    (dir, Checkpoint::open(&path).unwrap())
}

#[test]
fn a_missing_tensor_is_named_with_the_nearest() {
    let (_dir, checkpoint) = opened();
    let shard = ShardSpec::whole(&[6], Axis::Tp, 0, 1);
    assert!(checkpoint.contains("model.norm.weight") && !checkpoint.contains("model.norn.weight"));
    let error = checkpoint
        .read("model.norn.weight", &shard, DType::F64)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("no tensor `model.norn.weight`; the nearest is `model.norm.weight`"),
        "{error}"
    );
}

#[test]
fn a_checkpoint_of_another_model_is_refused_with_both_shapes() {
    let (_dir, checkpoint) = opened();
    let shard = ShardSpec::whole(&[8], Axis::Tp, 0, 1);
    let error = checkpoint
        .read("model.norm.weight", &shard, DType::F64)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("global shape [6], but the model has [8]"),
        "{error}"
    );
    assert!(
        error.contains("the checkpoint is of another model"),
        "{error}"
    );
}

#[test]
fn another_element_type_is_refused() {
    let (_dir, checkpoint) = opened();
    let shard = ShardSpec::whole(&[6], Axis::Tp, 0, 1);
    let error = checkpoint
        .read("model.norm.weight", &shard, DType::I64)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("`model.norm.weight` is F64, but must be I64"),
        "{error}"
    );
}

/// Writes `version` into the checkpoint's manifest and updates the manifest's hash.
fn set_version(folder: &Path, version: u64) {
    let path = folder.join("manifest.json");
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains("\"format\":3"));
    let text = text.replace("\"format\":3", &format!("\"format\":{version}"));
    fs::write(
        folder.join("manifest.xxh3"),
        format!("{:016x}", xxh3_64(text.as_bytes())),
    )
    .unwrap();
    fs::write(&path, text).unwrap();
}

#[test]
fn another_format_version_is_named() {
    let (_dir, checkpoint) = opened();
    set_version(checkpoint.path(), 12);
    let unknown = |error| {
        matches!(
            error,
            CheckpointError::UnknownVersion {
                found: 12,
                supported: 3,
                ..
            }
        )
    };
    assert!(unknown(Checkpoint::open(checkpoint.path()).unwrap_err()));
    // Another version may store its hash differently.
    fs::remove_file(checkpoint.path().join("manifest.xxh3")).unwrap();
    assert!(unknown(Checkpoint::open(checkpoint.path()).unwrap_err()));
}

#[test]
fn no_older_checkpoint_is_taken_in_place_of_one_of_another_version() {
    let (dir, checkpoint) = opened();
    let newest = save_as(dir.path(), 2, 8, "tp2");
    set_version(&newest, 4);
    let found = run_threads(2, GroupOptions::default(), |world| {
        find_latest(dir.path(), &world)
    });
    for found in found {
        let error = found.unwrap_err().to_string();
        assert!(error.contains("has checkpoint format 4"), "{error}");
    }
    assert!(checkpoint.path().exists() && newest.exists());
}

#[test]
fn a_folder_that_is_no_checkpoint_is_an_error_naming_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let error = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("manifest.json is missing"), "{error}");
}

/// A system error says nothing about the contents, so it must never cause an older checkpoint to be
/// used.
#[test]
fn an_error_of_the_system_is_no_damage_and_a_lost_or_changed_file_is() {
    for name in ["manifest.json", "manifest.xxh3", "rank-00000.safetensors"] {
        let dir = tempfile::tempdir().unwrap();
        let path = save_as(dir.path(), 1, 1, "tp1").join(name);
        let whole = fs::read(&path).unwrap();
        let open = || Checkpoint::open(path.parent().unwrap()).unwrap_err();
        fs::remove_file(&path).unwrap();
        let error = open();
        assert!(
            error.is_damage() && error.to_string().contains(name),
            "{error}"
        );
        // No user can follow this link, not even the superuser.
        std::os::unix::fs::symlink(&path, &path).unwrap();
        let error = open();
        assert!(
            !error.is_damage() && error.to_string().contains(name),
            "{error}"
        );
        fs::remove_file(&path).unwrap();
        fs::write(&path, &whole[1..]).unwrap();
        let error = open();
        assert!(
            error.is_damage() && error.to_string().contains("damaged"),
            "{error}"
        );
    }
}
