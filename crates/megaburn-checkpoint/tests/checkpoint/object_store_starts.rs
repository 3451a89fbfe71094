//! Two starts of one run that upload to one store, and files that are damaged before an upload.

use std::fs;

use megaburn_checkpoint::{
    CheckpointError, CheckpointUpload, OpenedCheckpoint, Retention, StoreWriter, UploadStage,
};
use megaburn_collective::{GroupOptions, ProcessGroups, run_threads};
use megaburn_mesh::Layout;
use rstest::rstest;

use crate::object_store::{Places, RUN, own_error};

const TAKEN: &str = "another start of this run has taken over";

/// A start claims step 3, or uploads its files too. Then another start of the same run takes over,
/// and uploads the same step or not.
#[rstest]
fn a_start_that_was_taken_over_completes_and_deletes_nothing(
    #[values(false, true)] has_files: bool,
    #[values(false, true)] is_uploaded: bool,
) {
    let places = Places::new(&[2, 3]);
    let store = places.store();
    places.upload(&store, 2, 0);
    let layout: Layout = "tp2".parse().unwrap();
    let ranks = run_threads(2, GroupOptions::default(), |world| {
        let groups = ProcessGroups::new(&world, layout)?;
        let begin = |writer: &StoreWriter, step| {
            let opened = OpenedCheckpoint::open(&places.local(step), world.rank(), 2);
            CheckpointUpload::begin(writer, step, Retention::newest(1), opened, &groups)
        };
        let old = StoreWriter::begin(&store, RUN, &world)?;
        let mut upload = begin(&old, 3)?;
        if has_files {
            while upload.advance(&groups)? != UploadStage::Continued {}
        }
        let last = if has_files { "rank-" } else { "run-" };
        let num_last = 1 + usize::from(has_files);
        let is_there = || {
            let all = places.folder().list().unwrap();
            let name = format!("step-00000003/{last}");
            let found = all.iter().filter(|object| object.name.starts_with(&name));
            found.count() == num_last
        };
        while !is_there() {
            std::thread::yield_now();
        }
        world.barrier()?;
        let new = StoreWriter::begin(&store, RUN, &world)?;
        if is_uploaded {
            begin(&new, 3)?.finish(&groups)?;
        }
        let errors = [
            upload.finish(&groups).unwrap_err(),
            begin(&old, 2)?.finish(&groups).unwrap_err(),
        ];
        Ok::<_, CheckpointError>(errors)
    });
    for (rank, errors) in ranks.into_iter().enumerate() {
        for error in own_error(errors).unwrap() {
            assert!(error.to_string().contains(TAKEN), "{error}");
            assert!(rank > 0 || error.is_taken_over());
        }
    }
    let kept = if is_uploaded { 3 } else { 2 };
    assert_eq!(places.complete(), [kept]);
    assert_eq!(store.list().unwrap().len(), 1);
}

#[test]
fn a_file_that_was_damaged_before_its_upload_completes_nothing() {
    let places = Places::new(&[1, 2]);
    let store = places.store();
    places.upload(&store, 1, 1);
    for rank in 0..2 {
        let path = places.local(2).join(format!("rank-{rank:05}.safetensors"));
        let whole = fs::read(&path).unwrap();
        let mut bytes = whole.clone();
        let last = bytes.len() - 1 - rank;
        bytes[last] ^= 1;
        fs::write(&path, &bytes).unwrap();
        let error = places
            .upload_as(&store, RUN, 2, &Retention::newest(1))
            .unwrap_err();
        let expected = format!("step-00000002` is not a whole checkpoint: rank-{rank:05}");
        assert!(error.to_string().contains(&expected), "{error}");
        assert_eq!(places.complete(), [1]);
        fs::write(&path, &whole).unwrap();
    }
    places.upload(&store, 2, 1);
    assert_eq!(places.complete(), [2]);
}

#[test]
fn a_complete_checkpoint_without_a_mark_is_not_ignored() {
    let places = Places::new(&[2]);
    let store = places.store();
    places.upload(&store, 2, 0);
    let stored = || store.list().unwrap().remove(0);
    assert_eq!(store.runs_of(&stored()).unwrap(), [RUN.to_owned()].into());
    for file in fs::read_dir(places.object("step-00000002")).unwrap() {
        let path = file.unwrap().path();
        if path.extension().unwrap() == "owner" {
            fs::remove_file(path).unwrap();
        }
    }
    // Its manifest names no run.
    let error = store.runs_of(&stored()).unwrap_err().to_string();
    let expected = format!("`{}` is a complete checkpoint without", store.url_of(2));
    assert!(error.starts_with(&expected), "{error}");
    fs::remove_file(places.object("step-00000002/manifest.json")).unwrap();
    assert_eq!(store.runs_of(&stored()).unwrap(), [].into());
}
