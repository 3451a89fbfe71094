use std::{
    fs,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
};

use burn::tensor::TensorData;
use megaburn_checkpoint::{
    Advance, AsyncSave, Checkpoint, CheckpointError, NamedTensor, PendingValues, Retention,
    SharedGuard, find_latest, prepare,
};
use megaburn_collective::{GroupOptions, ProcessGroups, run_threads};
use megaburn_mesh::Layout;

use crate::model::{alone, begin_rank, check, names, save_as, snapshot, tensors};

#[test]
fn an_asynchronous_save_writes_the_values_of_its_start() {
    let dir = tempfile::tempdir().unwrap();
    let layout: Layout = "tp2-dp2".parse().unwrap();
    let ranks = run_threads(4, GroupOptions::default(), |world| {
        prepare(dir.path(), &world)?;
        let groups = ProcessGroups::new(&world, layout)?;
        for step in [3, 4, 9] {
            let mut save = begin_rank(dir.path(), 2, step, &groups)?;
            assert_eq!(save.step(), step);
            // The result is the same on all ranks, whatever their threads do.
            let mut committed = None;
            loop {
                match save.advance(&groups)? {
                    Advance::Pending | Advance::Continued => {}
                    Advance::Committed(path) => committed = Some(path),
                    Advance::Done => break,
                }
            }
            assert_eq!(committed, Some(dir.path().join(format!("step-{step:08}"))));
        }
        Ok::<_, CheckpointError>(())
    });
    ranks.into_iter().for_each(|rank| rank.unwrap());
    assert_eq!(names(dir.path()), ["step-00000004", "step-00000009"]);
    for step in [4, 9] {
        let path = dir.path().join(format!("step-{step:08}"));
        let checkpoint = Checkpoint::open(&path).unwrap();
        checkpoint.verify().unwrap();
        check(&checkpoint, step, 4);
    }
}

/// The values that a rank's thread waits for until `release` is dropped.
fn waiting(values: TensorData, release: Arc<Mutex<mpsc::Receiver<()>>>) -> PendingValues {
    Box::new(move || {
        // An error says that the sender was dropped.
        let _ = release.lock().unwrap().recv();
        Ok(values)
    })
}

/// Begins to save step 2 with tensor 0 of `rank` replaced, and calls `then`.
fn with_values(
    dir: &Path,
    rank: usize,
    values: impl Fn(TensorData) -> Result<PendingValues, CheckpointError> + Sync,
    then: impl Fn(&ProcessGroups, Result<AsyncSave, CheckpointError>) + Sync,
) {
    let layout: Layout = "tp2".parse().unwrap();
    let ranks = run_threads(2, GroupOptions::default(), |world| {
        let groups = ProcessGroups::new(&world, layout)?;
        let tensors = tensors(groups.tp.rank(), 2);
        let named = tensors.iter().enumerate().map(|(number, tensor)| {
            let named = crate::model::named(tensor, 2);
            if (number, world.rank()) != (0, rank) {
                return named;
            }
            NamedTensor::ranged(tensor.name, &tensor.shard, tensor.dtype, |range| {
                values((named.values)(range)?()?)
            })
        });
        let save = AsyncSave::begin(
            dir,
            &Retention::newest(2),
            None,
            &groups,
            snapshot(2),
            named,
        );
        then(&groups, save);
        Ok::<_, CheckpointError>(())
    });
    ranks.into_iter().for_each(|rank| rank.unwrap());
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
fn it_is_written_when_the_last_rank_has_written() {
    let dir = tempfile::tempdir().unwrap();
    save_as(dir.path(), 2, 1, "tp2");
    for slow in [0, 1] {
        let (release, wait) = mpsc::channel::<()>();
        let (release, wait) = (Mutex::new(Some(release)), Arc::new(Mutex::new(wait)));
        with_values(
            dir.path(),
            slow,
            |values| Ok(waiting(values, wait.clone())),
            |groups, save| {
                let mut save = save.unwrap();
                for _ in 0..50 {
                    assert_eq!(save.advance(groups).unwrap(), Advance::Pending);
                }
                groups.world.barrier().unwrap();
                release.lock().unwrap().take();
                save.finish(groups).unwrap();
            },
        );
        let checkpoint = Checkpoint::open(&dir.path().join("step-00000002")).unwrap();
        check(&checkpoint, 2, 2);
    }
}

#[test]
fn a_failure_of_one_thread_is_an_error_on_all_and_leaves_the_older_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    save_as(dir.path(), 2, 1, "tp2");
    for bad in [0, 1] {
        let failing = |_| -> Result<PendingValues, CheckpointError> {
            let (name, why) = ("w".to_string(), "the disk is on fire".to_string());
            Ok(Box::new(|| Err(CheckpointError::Source { name, why })))
        };
        with_values(dir.path(), bad, failing, |groups, save| {
            let error = save.unwrap().finish(groups).unwrap_err().to_string();
            assert!(error.contains("the disk is on fire"), "{error}");
        });
        only_the_first(dir.path());
        let panicking = |_| -> Result<PendingValues, CheckpointError> {
            Ok(Box::new(|| panic!("a panic of a test")))
        };
        with_values(dir.path(), bad, panicking, |groups, save| {
            let error = save.unwrap().finish(groups).unwrap_err().to_string();
            assert!(error.contains("panicked"), "{error}");
        });
        only_the_first(dir.path());
        let refusing = |_| {
            let (name, why) = ("w".to_string(), "no memory".to_string());
            Err(CheckpointError::Source { name, why })
        };
        with_values(dir.path(), bad, refusing, |_, save| {
            let error = save.unwrap_err().to_string();
            assert!(error.contains("no memory"), "{error}");
        });
        only_the_first(dir.path());
    }
}

#[test]
fn a_save_that_is_dropped_stops_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    save_as(dir.path(), 2, 1, "tp2");
    let (release, wait) = mpsc::channel::<()>();
    let (release, wait) = (Mutex::new(Some(release)), Arc::new(Mutex::new(wait)));
    with_values(
        dir.path(),
        1,
        |values| Ok(waiting(values, wait.clone())),
        |groups, save| {
            release.lock().unwrap().take();
            // Rank 0 removes the folder, so the others stop writing first.
            let mut save = Some(save.unwrap());
            if groups.world.rank() == 1 {
                save = None;
            }
            groups.world.barrier().unwrap();
            drop(save);
        },
    );
    only_the_first(dir.path());
}

/// The guard is asked at the start and before the commit.
#[test]
fn a_refusal_of_the_guard_leaves_the_older_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    save_as(dir.path(), 2, 1, "tp1");
    let groups = ProcessGroups::single(0);
    let tensors = tensors(0, 1);
    let is_taken = Arc::new(AtomicBool::new(true));
    let flag = is_taken.clone();
    let guard: SharedGuard = Arc::new(move || match flag.load(Ordering::Relaxed) {
        true => Err("it was taken".to_string()),
        false => Ok(()),
    });
    let begin = || {
        let named = tensors.iter().map(|tensor| crate::model::named(tensor, 2));
        let keep = Retention::newest(2);
        AsyncSave::begin(
            dir.path(),
            &keep,
            Some(guard.clone()),
            &groups,
            snapshot(2),
            named,
        )
    };
    assert!(begin().unwrap_err().to_string().contains("it was taken"));
    is_taken.store(false, Ordering::Relaxed);
    let save = begin().unwrap();
    is_taken.store(true, Ordering::Relaxed);
    let error = save.finish(&groups).unwrap_err().to_string();
    assert!(error.contains("it was taken"), "{error}");
    only_the_first(dir.path());
}

/// Old checkpoints are verified by the threads; one that is damaged does not count and stays.
#[test]
fn retention_counts_only_intact_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    for step in [1, 2, 3] {
        save_as(dir.path(), 9, step, "tp2");
    }
    let damaged = dir.path().join("step-00000003/rank-00001.safetensors");
    let mut bytes = fs::read(&damaged).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&damaged, bytes).unwrap();
    for step in [4, 5] {
        let ranks = run_threads(2, GroupOptions::default(), |world| {
            let groups = ProcessGroups::new(&world, "tp2".parse().unwrap())?;
            begin_rank(dir.path(), 2, step, &groups)?.finish(&groups)
        });
        ranks.into_iter().for_each(|rank| drop(rank.unwrap()));
    }
    assert_eq!(
        names(dir.path()),
        ["step-00000003", "step-00000004", "step-00000005"]
    );
}
