use std::{env, fs, path::Path, process::Command, time::Duration};

use burn::tensor::{DType, TensorData};
use megaburn_checkpoint::{CheckpointError, NamedTensor, Retention, find_latest, save};
use megaburn_collective::{GroupOptions, ProcessGroups, RankFailure, run_threads};
use megaburn_mesh::Layout;

use crate::model::{alone, check, named, names, save_as, save_rank, snapshot, tensors};

const CHILD_DIR: &str = "MEGABURN_TEST_LIMITED_DIR";

/// The error of every rank if all ranks of a layout save step 2 with tensors changed by
/// `spoil(rank, tensors)`.
fn errors(
    dir: &Path,
    layout: &str,
    spoil: impl Fn(usize, &mut Vec<NamedTensor<'_>>) + Sync,
) -> Vec<String> {
    let layout: Layout = layout.parse().unwrap();
    let options = GroupOptions {
        timeout: Duration::from_secs(10),
        ..Default::default()
    };
    let ranks = run_threads(layout.world_size(), options, |world| {
        let groups = ProcessGroups::new(&world, layout)?;
        let tensors = tensors(groups.tp.rank(), groups.tp.size());
        let mut named: Vec<_> = tensors.iter().map(|tensor| named(tensor, 2)).collect();
        spoil(world.rank(), &mut named);
        save(
            dir,
            &Retention::newest(2),
            None,
            &groups,
            &snapshot(2),
            named,
        )
    });
    ranks
        .into_iter()
        .map(|rank| rank.unwrap_err().to_string())
        .collect()
}

/// Checks that step 1 is there and intact, and that nothing of step 2 is.
fn only_the_first(dir: &Path) {
    assert_eq!(names(dir), ["step-00000001"]);
    check(
        &find_latest(dir, &alone()).unwrap().checkpoint.unwrap(),
        1,
        2,
    );
}

#[test]
fn a_failure_of_one_rank_is_an_error_on_all_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    save_as(dir.path(), 2, 1, "tp2-dp2");
    for bad in [0, 1] {
        let errors = errors(dir.path(), "tp2-dp2", |rank, tensors| {
            if rank == bad {
                // Wide elements come first, so these ranks write the first half of it.
                let data = TensorData::from([1i64; 3]);
                tensors[5].values = Box::new(|_| Ok(Box::new(|| Ok(data))));
            }
        });
        for (rank, error) in errors.iter().enumerate() {
            let own = "cannot save tensor `model.layers.0.cube`: it has 3 elements";
            assert!(error.contains(own), "{error}");
            assert_eq!(
                error.contains(&format!("rank {bad} failed")),
                rank != bad,
                "{error}"
            );
        }
        only_the_first(dir.path());
    }
}

#[test]
fn tensors_that_the_ranks_do_not_tile_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    save_as(dir.path(), 2, 1, "tp2");
    let missing = errors(dir.path(), "tp2", |rank, tensors| {
        if rank == 1 {
            tensors.remove(0);
        }
    });
    let why = "cannot save tensor `model.embedding.weight`: its pieces end at 8 of 13";
    assert!(
        missing.iter().all(|error| error.contains(why)),
        "{missing:?}"
    );
    let twice = errors(dir.path(), "tp2", |_, tensors| {
        let again = TensorData::from([0.0f32]);
        tensors.push(NamedTensor::new(
            tensors[0].name.clone(),
            tensors[0].shard,
            again,
        ));
    });
    assert!(
        twice
            .iter()
            .all(|error| error.contains("it is given twice")),
        "{twice:?}"
    );
    let named = errors(dir.path(), "tp2", |_, tensors| tensors[0].name += "#3");
    assert!(
        named
            .iter()
            .all(|error| error.contains("its name contains a `#`")),
        "{named:?}"
    );
    let boolean = errors(dir.path(), "tp2", |_, tensors| {
        let data = TensorData::from([true; 6]);
        tensors[6] = NamedTensor::new("model.norm.weight", tensors[6].shard, data);
    });
    assert!(
        boolean
            .iter()
            .all(|error| error.contains("which checkpoints do not support")),
        "{boolean:?}"
    );
    only_the_first(dir.path());
}

#[test]
fn a_folder_that_cannot_be_made_is_an_error_on_all() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "in the way").unwrap();
    let errors = errors(&file.join("checkpoints"), "tp2-dp2", |_, _| {});
    assert!(
        errors
            .iter()
            .all(|error| error.contains("cannot create the folder")),
        "{errors:?}"
    );
}

#[test]
fn a_panic_of_one_rank_ends_the_others_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    save_as(dir.path(), 2, 1, "tp4");
    for bad in 0..4 {
        let errors = errors(dir.path(), "tp4", |rank, _| assert_ne!(rank, bad, "a bug"));
        assert!(
            errors.iter().all(|error| error.contains("a bug")),
            "{errors:?}"
        );
        only_the_first(dir.path());
    }
}

/// A tensor in the middle of the file whose values cannot be obtained, or do not have the announced
/// type.
#[test]
fn a_tensor_that_fails_while_it_is_written_is_an_error_on_all_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    save_as(dir.path(), 2, 1, "tp2-dp2");
    let fails = errors(dir.path(), "tp2-dp2", |rank, tensors| {
        if rank == 1 {
            let name = tensors[3].name.clone();
            let why = "the device is gone".to_string();
            tensors[3].values = Box::new(|_| Err(CheckpointError::Source { name, why }));
        }
    });
    for (rank, error) in fails.iter().enumerate() {
        let own =
            "cannot read tensor `model.layers.0.gate_up.weight` to save it: the device is gone";
        assert!(error.contains(own), "{error}");
        assert_eq!(error.contains("rank 1 failed"), rank != 1, "{error}");
    }
    let other = errors(dir.path(), "tp2", |_, tensors| {
        tensors[3].dtype = DType::F16
    });
    assert!(
        other
            .iter()
            .all(|e| e.contains("it is F32, but F16 was expected")),
        "{other:?}"
    );
    only_the_first(dir.path());
}

/// Simulates a full disk with the shell's file size limit. Its signal is ignored, because a full
/// disk sends none. Files are limited to 512 bytes, less than a rank writes.
#[test]
fn a_full_disk_is_an_error_on_every_rank_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    save_as(dir.path(), 2, 1, "tp2");
    let child = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 1; exec \"$0\" \"$@\""])
        .arg(env::current_exe().unwrap())
        .args([
            "--exact",
            "failures::child_saves_on_a_full_disk",
            "--ignored",
        ])
        .env(CHILD_DIR, dir.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(
        child.status.success() && said.contains("1 passed"),
        "{said}"
    );
    only_the_first(dir.path());
}

#[test]
#[ignore = "the child of the test above"]
fn child_saves_on_a_full_disk() {
    let dir = env::var(CHILD_DIR).expect("started by its parent test");
    let layout: Layout = "tp2-dp2".parse().unwrap();
    let ranks = run_threads(4, GroupOptions::default(), |world| {
        let result = save_rank(Path::new(&dir), 2, 2, &ProcessGroups::new(&world, layout)?);
        // The groups still work, so the run can continue and retry later.
        world.barrier()?;
        result
    });
    for rank in ranks {
        let Err(RankFailure::Failed(error)) = rank else {
            panic!("{rank:?}")
        };
        let error: CheckpointError = error;
        assert!(error.to_string().contains("cannot write"), "{error}");
        assert!(error.to_string().contains("File too large"), "{error}");
    }
}
