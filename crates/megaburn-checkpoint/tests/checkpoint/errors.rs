use std::fs;

use burn::tensor::DType;
use megaburn_checkpoint::{Checkpoint, CheckpointError};
use megaburn_mesh::{Axis, ShardSpec};
use tempfile::TempDir;

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
    let error = checkpoint.read("model.norn.weight", &shard, DType::F64).unwrap_err().to_string();
    assert!(
        error.contains("no tensor `model.norn.weight`; the nearest is `model.norm.weight`"),
        "{error}"
    );
}

#[test]
fn a_checkpoint_of_another_model_is_refused_with_both_shapes() {
    let (_dir, checkpoint) = opened();
    let shard = ShardSpec::whole(&[8], Axis::Tp, 0, 1);
    let error = checkpoint.read("model.norm.weight", &shard, DType::F64).unwrap_err().to_string();
    assert!(error.contains("global shape [6] and [8] is wanted"), "{error}");
    assert!(error.contains("a checkpoint of another model"), "{error}");
}

#[test]
fn another_element_type_is_refused() {
    let (_dir, checkpoint) = opened();
    let shard = ShardSpec::whole(&[6], Axis::Tp, 0, 1);
    let error = checkpoint.read("model.norm.weight", &shard, DType::I64).unwrap_err().to_string();
    assert!(error.contains("`model.norm.weight` is F64 and I64 is wanted"), "{error}");
}

#[test]
fn another_format_version_is_named() {
    let (_dir, checkpoint) = opened();
    let path = checkpoint.path().join("manifest.json");
    let text = fs::read_to_string(&path).unwrap().replace("\"format\": 2", "\"format\": 12");
    fs::write(&path, text).unwrap();
    let error = Checkpoint::open(checkpoint.path()).unwrap_err();
    assert!(matches!(error, CheckpointError::UnknownVersion { found: 12, supported: 2, .. }));
}

#[test]
fn a_folder_that_is_no_checkpoint_is_an_error_naming_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let error = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("cannot read") && error.contains("manifest.json"), "{error}");
}
