//! Uploads of which each request fails in turn: a checkpoint is complete or absent.

use std::{collections::BTreeMap, fs, sync::Arc};

use megaburn_checkpoint::{CheckpointStore, Retention};
use rstest::rstest;

use crate::{
    memory_folder::{Fault, MemoryFolder},
    object_store::{Places, RUN},
};

/// The steps of complete checkpoints, each of which is compared with what was saved.
fn complete(store: &CheckpointStore, folder: &MemoryFolder, places: &Places) -> Vec<u64> {
    let all = store.list().unwrap();
    let complete = all.iter().filter(|stored| stored.is_complete());
    let steps = complete.map(|stored| {
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

/// Uploads step 3 next to step 1, in place of an older upload of it or not, with a fault at each
/// request in turn; step 1 is then deleted.
#[rstest]
fn at_each_fault_the_store_has_the_old_checkpoints_or_the_new_one(
    #[values(Fault::Before, Fault::After, Fault::Killed)] fault: Fault,
    #[values(false, true)] is_replaced: bool,
) {
    let places = Places::new(&[1, 3, 5]);
    let keep = Retention::newest(1);
    let before = objects_of(&places, if is_replaced { &[1, 3] } else { &[1] });
    for at in 0.. {
        assert!(at < 50);
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
        if at.is_multiple_of(2) {
            sound.remove_leftovers(&sound.list().unwrap(), RUN).unwrap();
            assert_eq!(complete(&sound, &folder, &places), found);
            let all = sound.list().unwrap();
            assert!(all.iter().all(|stored| stored.is_complete()));
        }
        places.upload(&sound, 5, 1);
        assert_eq!(complete(&sound, &folder, &places), [5]);
        assert_eq!(sound.list().unwrap().len(), 1, "{at}");
    }
}
