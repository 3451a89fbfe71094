//! Checkpoints in a folder of objects.

use std::{fs, path::Path, sync::Arc};

use megaburn_checkpoint::{
    Checkpoint, CheckpointError, CheckpointState, CheckpointStore, CheckpointUpload,
    OpenedCheckpoint, Retention, StoreWriter, UploadStage, find_latest,
};
use megaburn_collective::{GroupOptions, ProcessGroups, Progress, RankFailure, run_threads};
use megaburn_mesh::Layout;
use megaburn_store::{ObjectFolder, StoreConfig, open_folder};
use tempfile::TempDir;

use crate::model::{check, names, save_as};

/// The run that uploads.
pub(crate) const RUN: &str = "1f";

/// Checkpoints of two ranks on this host, and a folder of objects.
pub(crate) struct Places {
    dir: TempDir,
}

impl Places {
    /// Saves checkpoints of these steps on this host.
    pub(crate) fn new(steps: &[u64]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for step in steps {
            save_as(&dir.path().join("local"), 0, *step, "tp2");
        }
        Self { dir }
    }

    pub(crate) fn local(&self, step: u64) -> std::path::PathBuf {
        self.dir.path().join(format!("local/step-{step:08}"))
    }

    /// The path of an object.
    pub(crate) fn object(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join("store").join(name)
    }

    pub(crate) fn folder(&self) -> Arc<dyn ObjectFolder> {
        let url = format!("file://{}/store", self.dir.path().display());
        open_folder(&url, "a run", &StoreConfig::new()).unwrap()
    }

    pub(crate) fn store(&self) -> CheckpointStore {
        CheckpointStore::new(self.folder())
    }

    /// Uploads a checkpoint as a start of run `run_id`, from two ranks.
    pub(crate) fn upload_as(
        &self,
        store: &CheckpointStore,
        run_id: &str,
        step: u64,
        retention: &Retention,
    ) -> Result<u64, CheckpointError> {
        let layout: Layout = "tp2".parse().unwrap();
        let ranks = run_threads(2, GroupOptions::default(), |world| {
            let groups = ProcessGroups::new(&world, layout)?;
            let opened = OpenedCheckpoint::open(&self.local(step), world.rank(), 2);
            let retention = retention.clone();
            let writer = StoreWriter::begin(store, run_id, &world)?;
            let mut upload = CheckpointUpload::begin(&writer, step, retention, opened, &groups)?;
            if step.is_multiple_of(2) {
                return upload.finish(&groups);
            }
            loop {
                if let UploadStage::Done(num_bytes) = upload.advance(&groups)? {
                    return Ok(num_bytes);
                }
            }
        });
        let mut ranks: Vec<_> = ranks.into_iter().map(own_error).collect();
        let other = ranks.pop().unwrap();
        let first = ranks.pop().unwrap();
        assert_eq!(first.is_ok(), other.is_ok());
        first
    }

    pub(crate) fn upload(&self, store: &CheckpointStore, step: u64, keep: usize) -> u64 {
        let keep = Retention::newest(keep);
        self.upload_as(store, RUN, step, &keep).unwrap()
    }

    /// The steps of complete checkpoints, each of which is fetched and compared with what was saved.
    pub(crate) fn complete(&self) -> Vec<u64> {
        let store = self.store();
        let all = store.list().unwrap();
        let complete = all.iter().filter(|stored| stored.is_complete());
        let steps = complete.map(|stored| {
            let out = tempfile::tempdir().unwrap();
            let path = out.path().join("copy");
            store
                .fetch(stored.step, &path, false, &Progress::none())
                .unwrap();
            check(&Checkpoint::open(&path).unwrap(), stored.step, 2);
            assert_eq!(names(out.path()), ["copy"]);
            assert_eq!(store.look(stored).state, CheckpointState::Whole);
            stored.step
        });
        steps.collect()
    }
}

/// What a rank returned.
pub(crate) fn own_error<T>(
    rank: Result<T, RankFailure<CheckpointError>>,
) -> Result<T, CheckpointError> {
    rank.map_err(|failure| match failure {
        RankFailure::Failed(error) => error,
        other => panic!("{other}"),
    })
}

fn bytes_in(folder: &Path) -> u64 {
    let files = fs::read_dir(folder).unwrap();
    files
        .map(|file| file.unwrap().metadata().unwrap().len())
        .sum()
}

#[test]
fn a_checkpoint_is_uploaded_by_all_ranks_and_downloaded_by_all() {
    let places = Places::new(&[3, 4]);
    let store = places.store();
    assert_eq!(store.list().unwrap(), []);
    for step in [3, 4] {
        assert_eq!(
            places.upload(&store, step, 0),
            bytes_in(&places.local(step))
        );
    }
    let mut found = names(&places.object("step-00000003"));
    let mark = found.pop().unwrap();
    assert!(mark.starts_with("run-1f.") && mark.ends_with(".owner"));
    assert_eq!(
        found,
        [
            "manifest.json",
            "manifest.xxh3",
            "rank-00000.safetensors",
            "rank-00001.safetensors"
        ]
    );
    assert_eq!(places.complete(), [3, 4]);
    assert_eq!(store.manifest(4).unwrap().step, 4);

    // Three ranks copy what two have written.
    let dir = tempfile::tempdir().unwrap();
    let ranks = run_threads(3, GroupOptions::default(), |world| {
        let groups = ProcessGroups::new(&world, "dp3".parse().unwrap())?;
        let path = store.download(3, dir.path(), &groups)?;
        let latest = find_latest(dir.path(), &world)?;
        assert_eq!(latest.checkpoint.unwrap().path(), path);
        Ok::<_, CheckpointError>(path)
    });
    for path in ranks {
        let path = path.unwrap();
        assert_eq!(path, dir.path().join("step-00000003"));
        check(&Checkpoint::open(&path).unwrap(), 3, 2);
    }
    assert_eq!(names(dir.path()), ["step-00000003"]);
}

#[test]
fn the_local_checkpoint_may_be_deleted_while_it_is_uploaded() {
    let places = Places::new(&[2]);
    let store = places.store();
    let layout: Layout = "tp2".parse().unwrap();
    let ranks = run_threads(2, GroupOptions::default(), |world| {
        let groups = ProcessGroups::new(&world, layout)?;
        let opened = OpenedCheckpoint::open(&places.local(2), world.rank(), 2);
        world.barrier()?;
        if world.rank() == 0 {
            fs::remove_dir_all(places.local(2)).unwrap();
        }
        world.barrier()?;
        let keep = Retention::default();
        let writer = StoreWriter::begin(&store, RUN, &world)?;
        CheckpointUpload::begin(&writer, 2, keep, opened, &groups)?.finish(&groups)
    });
    assert!(ranks.into_iter().all(|rank| rank.is_ok()));
    assert_eq!(places.complete(), [2]);
}

#[test]
fn the_rules_of_retention_hold_in_the_store_too() {
    let places = Places::new(&[2, 3, 4, 5, 6, 7]);
    let store = places.store();
    let retention = Retention {
        newest: 1,
        every: 4,
        best: 1,
        losses: [(2, 0.5), (3, 0.25), (5, 0.5)].into(),
        ..Retention::default()
    };
    for (step, kept) in [
        (2, vec![2]),
        (3, vec![3]),
        (4, vec![3, 4]),
        (5, vec![3, 4, 5]),
        (7, vec![3, 4, 7]),
    ] {
        places.upload_as(&store, RUN, step, &retention).unwrap();
        assert_eq!(places.complete(), kept, "after {step}");
    }
    // A later checkpoint belongs to another past of the run.
    places.upload(&store, 5, 1);
    assert_eq!(places.complete(), [5, 7]);
    // One that is not whole neither counts nor is it deleted.
    let rank = places.object("step-00000005/rank-00001.safetensors");
    let bytes = fs::read(&rank).unwrap();
    places.upload(&store, 6, 2);
    fs::write(&rank, &bytes[1..]).unwrap();
    places.upload(&store, 7, 2);
    places.upload(&store, 4, 0);
    places.upload(&store, 7, 2);
    fs::write(&rank, &bytes).unwrap();
    assert_eq!(places.complete(), [5, 6, 7]);
}

#[test]
fn what_megaburn_did_not_write_stays() {
    let places = Places::new(&[1, 2, 3]);
    let store = places.store();
    let folder = places.folder();
    folder.put("notes.txt", b"mine").unwrap();
    folder.put("step-00000001/notes.txt", b"mine").unwrap();
    folder
        .put("step-00000001/sub/rank-00000.safetensors", b"mine")
        .unwrap();
    folder
        .put("step-00000009/rank-00000.safetensors", b"mine")
        .unwrap();
    folder.put("step-1/manifest.json", b"mine").unwrap();
    places.upload(&store, 1, 1);
    places.upload(&store, 2, 1);
    assert_eq!(places.complete(), [2]);
    // Neither another run's checkpoint nor objects without a mark are replaced.
    for step in [2, 3] {
        let error = places
            .upload_as(&store, "2f", step, &Retention::default())
            .unwrap_err();
        let expected = "holds checkpoints of run 1f, and this is run 2f";
        assert!(error.to_string().contains(expected), "{error}");
    }
    folder
        .put("step-00000003/rank-00001.safetensors", b"mine")
        .unwrap();
    let error = places
        .upload_as(&store, RUN, 3, &Retention::default())
        .unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("step-00000003` has objects that megaburn did not write"),
        "{error}"
    );
    assert!(error.contains("`rank-00001.safetensors`"), "{error}");
    assert_eq!(places.complete(), [2]);
    let mine: Vec<_> = folder.list().unwrap();
    let mine = mine.iter().filter(|object| object.num_bytes == 4);
    assert_eq!(mine.count(), 6);
}

#[test]
fn a_damaged_checkpoint_is_not_downloaded() {
    let places = Places::new(&[2]);
    let store = places.store();
    places.upload(&store, 2, 0);
    let rank = places.object("step-00000002/rank-00001.safetensors");
    let mut bytes = fs::read(&rank).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&rank, &bytes).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let ranks = run_threads(2, GroupOptions::default(), |world| {
        let groups = ProcessGroups::new(&world, "dp2".parse().unwrap())?;
        store.download(2, dir.path(), &groups)
    });
    let error = store.fetch(2, &dir.path().join("out"), false, &Progress::none());
    let ranks = ranks.into_iter().map(own_error);
    for error in ranks.chain([error.map(|()| "".into())]) {
        let error = error.unwrap_err();
        assert!(error.is_damage(), "{error}");
        assert!(error.to_string().contains(&store.url_of(2)), "{error}");
        assert!(
            error
                .to_string()
                .contains("a copy of it does not have the xxh3"),
            "{error}"
        );
    }
    assert_eq!(names(dir.path()), [""; 0]);

    // A file of another size, and one that is missing, are seen without a download.
    fs::write(&rank, &bytes[1..]).unwrap();
    let look = || store.look(&store.list().unwrap()[0]).state;
    assert!(matches!(look(), CheckpointState::Damaged(why) if why.contains("rank-00001")));
    fs::remove_file(&rank).unwrap();
    assert!(matches!(look(), CheckpointState::Damaged(why) if why.contains("is missing")));
    let error = store
        .fetch(2, &dir.path().join("out"), false, &Progress::none())
        .unwrap_err();
    assert!(error.is_damage(), "{error}");
    let error = store
        .fetch(3, &dir.path().join("out"), false, &Progress::none())
        .unwrap_err();
    assert!(
        error.to_string().contains("there is no such checkpoint"),
        "{error}"
    );
    assert_eq!(names(dir.path()), [""; 0]);
}
