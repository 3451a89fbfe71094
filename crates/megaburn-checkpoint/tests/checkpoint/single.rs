//! A checkpoint at an exact path is complete or absent, and no other folder is ever deleted.

use std::{fs, path::Path};

use burn::tensor::{DType, TensorData};
use megaburn_checkpoint::{Checkpoint, CheckpointError, NamedTensor, Snapshot, save_single};
use megaburn_mesh::{Axis, FusedPart, ShardSpec};

use crate::model::{check, named, names, snapshot, tensors};

fn extra() -> Vec<(String, Vec<u8>)> {
    vec![
        ("hf/config.json".into(), b"{}".to_vec()),
        ("hf/notes".into(), b"n".to_vec()),
    ]
}

fn save(path: &Path, force: bool, step: u64) -> Result<(), CheckpointError> {
    let tensors = tensors(0, 1);
    let tensors = tensors.iter().map(|tensor| named(tensor, step));
    save_single(path, force, &snapshot(step), "dp1", tensors, &extra())
}

#[test]
fn it_opens_as_any_other_with_the_files_beside_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("deep/down/out");
    save(&path, false, 3).unwrap();
    let all = [
        "hf",
        "manifest.json",
        "manifest.xxh3",
        "rank-00000.safetensors",
    ];
    assert_eq!(names(&path), all);
    assert_eq!(fs::read(path.join("hf/config.json")).unwrap(), b"{}");
    assert_eq!(names(&dir.path().join("deep/down")), ["out"]);
    let checkpoint = Checkpoint::open(&path).unwrap();
    checkpoint.verify().unwrap();
    assert_eq!(checkpoint.model(), &snapshot(3).model);
    assert_eq!(checkpoint.manifest().layout, "dp1");
    for tp in [1, 2, 4] {
        check(&checkpoint, 3, tp);
    }
}

#[test]
fn an_existing_target_is_replaced_only_with_force_and_only_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out");
    save(&path, false, 1).unwrap();
    let error = save(&path, false, 2).unwrap_err().to_string();
    assert!(
        error.contains("out exists") && error.contains("--force"),
        "{error}"
    );
    check(&Checkpoint::open(&path).unwrap(), 1, 1);
    save(&path, true, 2).unwrap();
    check(&Checkpoint::open(&path).unwrap(), 2, 1);

    for other in ["file", "folder"] {
        let path = dir.path().join(other);
        match other {
            "file" => fs::write(&path, "mine").unwrap(),
            _ => {
                fs::create_dir(&path).unwrap();
                fs::write(path.join("file"), "mine").unwrap();
            }
        }
        let error = save(&path, true, 2).unwrap_err().to_string();
        assert!(error.contains("is not just a checkpoint (it "), "{error}");
    }
    assert_eq!(fs::read(dir.path().join("file")).unwrap(), b"mine");
    assert_eq!(fs::read(dir.path().join("folder/file")).unwrap(), b"mine");
    assert_eq!(names(dir.path()), ["file", "folder", "out"]);
}

#[test]
fn a_failure_leaves_nothing_of_the_new_one_and_the_old_one_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out");
    let spec = ShardSpec::whole(&[2], Axis::Tp, 0, 1);
    let cut = ShardSpec::split(&[4], 0, &[FusedPart::new(4)], Axis::Tp, 0, 2).unwrap();
    let good = || NamedTensor::new("good", &spec, TensorData::from([1.0f32, 2.0]));
    let fails = || {
        let why = "the file is gone".to_string();
        NamedTensor::lazy("bad", &spec, DType::F32, || {
            Err(CheckpointError::Source {
                name: "bad".into(),
                why,
            })
        })
    };
    let half = || NamedTensor::new("half", &cut, TensorData::from([1.0f32, 2.0]));
    let save_with = |target: &Path, tensor, extra: &[(String, Vec<u8>)]| {
        let tensors = [good(), tensor];
        save_single(target, true, &Snapshot::default(), "dp1", tensors, extra)
            .unwrap_err()
            .to_string()
    };
    let other = || NamedTensor::new("other", &spec, TensorData::from([1.0f32, 2.0]));
    for exists in [false, true] {
        if exists {
            save(&path, false, 1).unwrap();
        }
        let left = names(dir.path());
        let error = save_with(&path, fails(), &[]);
        assert!(
            error.contains("cannot read tensor `bad` to save it: the file is gone"),
            "{error}"
        );
        let error = save_with(&path, half(), &[]);
        assert!(
            error.contains("`half`: its pieces end at 2 of 4"),
            "{error}"
        );
        for outside in ["../x", "/tmp/x", "", "a/../../x"] {
            let error = save_with(&path, other(), &[(outside.to_string(), vec![])]);
            assert!(error.contains("not a relative path inside"), "{error}");
        }
        let error = save_with(&path, other(), &[("manifest.json".to_string(), vec![])]);
        assert!(
            error.contains("cannot write") && error.contains("File exists"),
            "{error}"
        );
        assert_eq!(names(dir.path()), left);
    }
    check(&Checkpoint::open(&path).unwrap(), 1, 1);

    let file = dir.path().join("file");
    fs::write(&file, "in the way").unwrap();
    let error = save_with(&file.join("out"), other(), &[]);
    assert!(error.contains("cannot create the folder"), "{error}");
    assert_eq!(names(dir.path()), ["file", "out"]);
    let error = save_with(&dir.path().join("new/deep/out"), fails(), &[]);
    assert!(error.contains("the file is gone"), "{error}");
    assert_eq!(names(dir.path()), ["file", "out"]);
}
