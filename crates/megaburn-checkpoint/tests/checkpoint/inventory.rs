//! Listing the checkpoints of a folder.

use std::{fs, time::SystemTime};

use megaburn_checkpoint::{
    CheckpointState, ListedCheckpoint, list_checkpoint, list_checkpoints, set_aside_damaged,
    set_aside_suspect,
};

use crate::model::{names, save_as};

/// The mark that a save writes into its folder.
const MARK: &str = "megaburn writes this folder\nfor a run, whose next start removes it\n";

#[test]
fn every_state_is_listed_and_nothing_is_changed() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    for step in [1, 2, 3, 4, 6] {
        save_as(dir.path(), 0, step, "tp2");
    }
    let aside = set_aside_damaged(&at("step-00000001")).unwrap();
    let suspect = set_aside_suspect(&at("step-00000006")).unwrap();
    let file = at("step-00000002/rank-00001.safetensors");
    let len = fs::metadata(&file).unwrap().len();
    fs::File::options()
        .write(true)
        .open(&file)
        .unwrap()
        .set_len(len - 3)
        .unwrap();
    fs::write(at("step-00000003/manifest.json"), r#"{"format": 99}"#).unwrap();
    fs::remove_file(at("step-00000003/manifest.xxh3")).unwrap();
    let left = "step-00000005.tmp-1-2";
    fs::create_dir(at(left)).unwrap();
    fs::write(at(left).join(".megaburn-owner"), MARK).unwrap();
    fs::write(at(left).join("rank-00000.safetensors"), [0; 1000]).unwrap();
    // A user's copy, and other folders and files.
    for name in [
        "step-00000004.tmp-copy",
        "step-00000004.tmp-1-2",
        "notes",
        "step-4",
    ] {
        fs::create_dir(at(name)).unwrap();
        fs::write(at(name).join("mine"), "years").unwrap();
    }
    fs::write(at("step-00000009"), "a file").unwrap();
    let before = names(dir.path());

    let found = list_checkpoints(dir.path()).unwrap();
    let steps: Vec<_> = found.iter().map(|listed| listed.step).collect();
    assert_eq!(steps, [1, 2, 3, 4, 5, 6].map(Some));
    assert_eq!(
        (&found[5].state, &found[5].path),
        (&CheckpointState::Suspect, &suspect)
    );
    let why = |listed: &ListedCheckpoint| match &listed.state {
        CheckpointState::Damaged(why) | CheckpointState::Unreadable(why) => why.clone(),
        other => panic!("{other:?}"),
    };
    assert_eq!(
        (&found[0].state, &found[0].path),
        (&CheckpointState::SetAside, &aside)
    );
    let expected = format!("rank-00001.safetensors: it has {} bytes of {len}", len - 3);
    assert!(why(&found[1]) == expected, "{:?}", found[1]);
    assert!(matches!(found[2].state, CheckpointState::Unreadable(_)));
    assert!(why(&found[2]).contains("format 99"), "{:?}", found[2]);
    let whole = &found[3];
    assert_eq!(whole.state, CheckpointState::Whole);
    let manifest = whole.manifest.as_ref().unwrap();
    assert_eq!(
        (whole.num_files(), manifest.layout.as_str()),
        (Some(2), "tp2")
    );
    assert!(whole.num_bytes > manifest.files.iter().map(|file| file.bytes).sum());
    let age = SystemTime::now()
        .duration_since(whole.saved.unwrap())
        .unwrap();
    assert!(age.as_secs() < 100);
    assert_eq!(found[4].state, CheckpointState::Unfinished);
    assert_eq!(found[4].num_bytes, 1000 + MARK.len() as u64);
    assert_eq!(names(dir.path()), before);
}

#[test]
fn a_checkpoint_may_have_any_name_and_a_folder_must_exist() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("best");
    fs::rename(save_as(&dir.path().join("run"), 1, 6, "tp1"), &path).unwrap();
    let found = list_checkpoint(&path);
    assert_eq!((found.step, found.state), (Some(6), CheckpointState::Whole));
    assert!(list_checkpoints(dir.path()).unwrap().is_empty());
    let gone = list_checkpoint(&dir.path().join("step-00000008"));
    assert!(
        matches!(gone.state, CheckpointState::Damaged(_)),
        "{gone:?}"
    );
    assert_eq!((gone.step, gone.num_bytes, gone.saved), (Some(8), 0, None));
    list_checkpoints(&dir.path().join("nowhere")).unwrap_err();
}
