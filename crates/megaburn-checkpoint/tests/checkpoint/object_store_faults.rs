//! Uploads of which each request fails in turn: a checkpoint is complete or absent.

use std::{collections::BTreeMap, fs, sync::Arc};

use megaburn_checkpoint::{
    CheckpointError, CheckpointState, CheckpointStore, Retention, StoreWriter, StoredCheckpoint,
};
use megaburn_collective::{Group, GroupOptions, run_threads};
use rstest::rstest;

use crate::{
    memory_folder::{Fault, MemoryFolder},
    object_store::{Places, RUN, own_error},
};

/// The steps of whole checkpoints, each of which is compared with what was saved.
fn complete(store: &CheckpointStore, folder: &MemoryFolder, places: &Places) -> Vec<u64> {
    let all = store.list().unwrap();
    let is_whole = |stored: &&StoredCheckpoint| store.look(stored).state == CheckpointState::Whole;
    let steps = all.iter().filter(is_whole).map(|stored| {
        for file in fs::read_dir(places.local(stored.step)).unwrap() {
            let path = file.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            let object = folder.object(&format!("step-{:08}/{name}", stored.step));
            assert!(object.unwrap() == fs::read(&path).unwrap(), "{name}");
        }
        stored.step
    });
    steps.collect()
}

/// The objects of a store that holds these steps.
fn objects_of(places: &Places, steps: &[u64]) -> BTreeMap<String, Vec<u8>> {
    let folder = Arc::new(MemoryFolder::default());
    let store = CheckpointStore::new(folder.clone());
    for step in steps {
        places.upload(&store, *step, 0);
    }
    folder.objects()
}

/// Begins a start of the run.
fn begin(store: &CheckpointStore) -> Result<StoreWriter, CheckpointError> {
    let begin = |world: Group| StoreWriter::begin(store, RUN, &world);
    own_error(run_threads(1, GroupOptions::default(), begin).remove(0))
}

/// Uploads step 3 next to step 1, in place of a damaged one or not, with a fault at every second
/// request in turn; step 1 is then deleted.
#[rstest]
fn at_each_fault_the_store_has_the_old_checkpoints_or_the_new_one(
    #[values(Fault::Before, Fault::After, Fault::Killed)] fault: Fault,
    #[values(false, true)] is_replaced: bool,
    #[values(0, 1)] first: usize,
) {
    let places = Places::new(&[1, 3, 5]);
    let keep = Retention::newest(1);
    let mut before = objects_of(&places, if is_replaced { &[1, 3] } else { &[1] });
    if is_replaced {
        before.remove("step-00000003/manifest.xxh3").unwrap();
    }
    for at in (first..).step_by(2) {
        assert!(at < 100);
        let faulty = Arc::new(MemoryFolder::faulty(before.clone(), fault, at));
        let store = CheckpointStore::new(faulty.clone());
        let uploaded = places.upload_as(&store, RUN, 3, &keep);
        let is_met = faulty.num_requests() > at;
        let folder = Arc::new(MemoryFolder::faulty(faulty.objects(), fault, usize::MAX));
        let sound = CheckpointStore::new(folder.clone());
        let found = complete(&sound, &folder, &places);
        match &uploaded {
            // The deletion of old checkpoints may have failed.
            Ok(_) => assert!(found.contains(&3), "{at}: {found:?}"),
            Err(error) => {
                assert!(is_met && error.to_string().contains("fails"), "{error}");
                assert!(found.contains(&1), "{at}: {found:?}");
            }
        }
        if !is_met {
            assert_eq!(found, [3]);
            break;
        }
        // The next start of the run removes what is left, and so does the next upload.
        if at % 4 < 2 {
            begin(&sound).unwrap();
            assert_eq!(complete(&sound, &folder, &places), found);
            let all = sound.list().unwrap();
            assert!(all.iter().all(|stored| stored.is_complete()));
        }
        places.upload(&sound, 5, 1);
        assert_eq!(complete(&sound, &folder, &places), [5]);
        // The damaged one is not deleted.
        let num_left = sound.list().unwrap().len();
        let most = if is_replaced && !found.contains(&3) {
            2
        } else {
            1
        };
        assert!((1..=most).contains(&num_left), "{at}: {num_left}");
    }
}

#[test]
fn a_leftover_that_cannot_be_removed_is_no_obstacle() {
    let places = Places::new(&[3]);
    let left = ["run-1f.2b.owner", "rank-00000.safetensors"];
    let left = left.map(|name| (format!("step-00000001/{name}"), b"left".to_vec()));
    for at in 3..=4 {
        // Requests 0 to 2 write the start, list the store, and read the start.
        let faulty = MemoryFolder::faulty(left.clone().into(), Fault::Before, at);
        let folder = Arc::new(faulty);
        let store = CheckpointStore::new(folder.clone());
        begin(&store).unwrap();
        assert!(folder.num_requests() > at && folder.object(&left[0].0).is_some());
        places.upload(&store, 3, 1);
        assert_eq!(complete(&store, &folder, &places), [3]);
        assert_eq!(folder.object(&left[0].0), None, "the upload removes it");
    }
}

#[test]
fn a_checkpoint_that_the_store_has_is_not_replaced() {
    let places = Places::new(&[2, 3]);
    let folder = Arc::new(MemoryFolder::default());
    let store = CheckpointStore::new(folder.clone());
    let num_bytes = places.upload(&store, 2, 1);
    let without_start = || {
        let mut objects = folder.objects();
        objects.remove("run-1f.start").unwrap();
        objects
    };
    let before = without_start();
    assert_eq!(places.upload(&store, 2, 1), num_bytes);
    // The mark has the token of its start, so it was not written again either.
    assert!(without_start() == before);
    // The rules of retention hold all the same.
    places.upload(&store, 3, 0);
    assert_eq!(complete(&store, &folder, &places), [2, 3]);
    places.upload(&store, 3, 1);
    assert_eq!(complete(&store, &folder, &places), [3]);
}
