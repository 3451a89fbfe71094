use std::{
    fs,
    path::{Path, PathBuf},
};

use megaburn_checkpoint::{CheckpointError, Refused, find_latest, newest, newest_valid};
use megaburn_collective::{GroupOptions, run_threads};
use tempfile::TempDir;

use crate::model::{Random, alone, check, names, save_as};

/// An older and a newer checkpoint, each with four rank files.
fn two() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    save_as(dir.path(), 2, 10, "tp4");
    let newest = save_as(dir.path(), 2, 20, "tp4");
    (dir, newest)
}

/// The newer checkpoint is refused with an error that names `file`, the older one is used, and all
/// ranks agree.
fn refused(dir: &Path, newest: &Path, file: &str, ranks: usize) {
    let found = run_threads(ranks, GroupOptions::default(), |world| {
        let latest = find_latest(dir, &world)?;
        check(&latest.checkpoint.expect("the older one is whole"), 10, 2);
        Ok::<_, CheckpointError>(latest.refused)
    });
    let found: Vec<Vec<Refused>> = found.into_iter().map(Result::unwrap).collect();
    assert!(found.iter().all(|refused| *refused == found[0]));
    assert_eq!(found[0].len(), 1);
    assert_eq!(found[0][0].path, newest);
    assert!(
        found[0][0].why.contains(file),
        "{file}: {}",
        found[0][0].why
    );
}

#[test]
fn a_flipped_bit_anywhere_is_found() {
    let (dir, newest) = two();
    let mut random = Random::fresh();
    let files = names(&newest);
    for round in 0..60 {
        let name = &files[random.below(files.len() as u64) as usize];
        let path = newest.join(name);
        let whole = fs::read(&path).unwrap();
        let mut bytes = whole.clone();
        let at = random.below(bytes.len() as u64) as usize;
        let bit = random.below(8);
        bytes[at] ^= 1 << bit;
        fs::write(&path, bytes).unwrap();
        // A flip in either manifest file makes the two disagree.
        let named = if name.starts_with("manifest") {
            "manifest"
        } else {
            name
        };
        refused(dir.path(), &newest, named, 1 + round % 3);
        fs::write(&path, whole).unwrap();
    }
    check(
        &find_latest(dir.path(), &alone())
            .unwrap()
            .checkpoint
            .unwrap(),
        20,
        4,
    );
}

#[test]
fn a_flipped_bit_in_the_version_is_damage_and_no_other_version() {
    let (dir, newest) = two();
    let path = newest.join("manifest.json");
    let whole = fs::read(&path).unwrap();
    let before = "\"format\":";
    let at = String::from_utf8_lossy(&whole).find(before).unwrap() + before.len();
    for bit in 0..8 {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << bit;
        fs::write(&path, bytes).unwrap();
        refused(dir.path(), &newest, "manifest", 2);
    }
}

#[test]
fn a_truncated_or_grown_file_is_found() {
    let (dir, newest) = two();
    let mut random = Random::fresh();
    for name in names(&newest) {
        let path = newest.join(&name);
        let whole = fs::read(&path).unwrap();
        let named = if name.starts_with("manifest") {
            "manifest"
        } else {
            &name
        };
        for len in [
            0,
            whole.len() - 1,
            random.below(whole.len() as u64) as usize,
        ] {
            fs::write(&path, &whole[..len]).unwrap();
            refused(dir.path(), &newest, named, 2);
        }
        fs::write(&path, [&whole[..], b"x"].concat()).unwrap();
        refused(dir.path(), &newest, named, 1);
        fs::write(&path, whole).unwrap();
    }
}

#[test]
fn a_lost_file_is_found() {
    let (dir, newest) = two();
    for name in names(&newest) {
        let path = newest.join(&name);
        let whole = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        refused(dir.path(), &newest, &name, 2);
        fs::write(&path, whole).unwrap();
    }
}

#[test]
fn swapped_files_are_found() {
    let (dir, newest) = two();
    // Ranks 1 and 2 have files of equal length, so only the hash distinguishes them.
    let [a, b] = ["rank-00001.safetensors", "rank-00002.safetensors"].map(|f| newest.join(f));
    assert_ne!(fs::read(&a).unwrap(), fs::read(&b).unwrap());
    let aside = newest.join("aside");
    fs::rename(&a, &aside).unwrap();
    fs::rename(&b, &a).unwrap();
    fs::rename(&aside, &b).unwrap();
    refused(dir.path(), &newest, "rank-0000", 2);
}

#[test]
fn when_all_are_damaged_there_is_none() {
    let (dir, newest) = two();
    fs::write(newest.join("manifest.json"), "{").unwrap();
    fs::remove_dir_all(dir.path().join("step-00000010")).unwrap();
    fs::create_dir(dir.path().join("step-00000005")).unwrap();
    let latest = find_latest(dir.path(), &alone()).unwrap();
    assert!(latest.checkpoint.is_none());
    assert_eq!(latest.refused.len(), 2);
    let nowhere = find_latest(&dir.path().join("nowhere"), &alone()).unwrap();
    assert!(nowhere.checkpoint.is_none() && nowhere.refused.is_empty());
}

/// Reading the start of `/proc/self/mem` gives EIO for every user.
#[cfg(target_os = "linux")]
#[test]
fn an_error_that_is_no_damage_never_makes_an_older_checkpoint_be_used() {
    let (dir, newest_path) = two();
    let manifest = newest_path.join("manifest.json");
    fs::remove_file(&manifest).unwrap();
    std::os::unix::fs::symlink("/proc/self/mem", &manifest).unwrap();
    let found = run_threads(2, GroupOptions::default(), |world| {
        find_latest(dir.path(), &world)
    });
    let found = found.into_iter().map(|rank| rank.unwrap_err().to_string());
    let alone = [newest(dir.path()), newest_valid(dir.path())];
    for error in found.chain(alone.map(|found| found.unwrap_err().to_string())) {
        assert!(
            error.contains("manifest.json") && error.contains("is not damage"),
            "{error}"
        );
        assert!(error.contains("host "), "{error}");
    }
}

#[test]
fn a_file_that_only_some_ranks_see_is_no_damage() {
    let (dir, _) = two();
    let elsewhere = tempfile::tempdir().unwrap();
    // Another host's folder of the same name, without the newest checkpoint's files.
    let copy = elsewhere.path().join("step-00000020");
    fs::create_dir(&copy).unwrap();
    let found = run_threads(2, GroupOptions::default(), |world| {
        find_latest(
            if world.rank() == 0 {
                dir.path()
            } else {
                elsewhere.path()
            },
            &world,
        )
    });
    for error in found.into_iter().map(|rank| rank.unwrap_err().to_string()) {
        assert!(error.contains("step-00000020"), "{error}");
        assert!(
            error.contains("all hosts must share") || error.contains("rank 1 failed"),
            "{error}"
        );
    }
}

#[test]
fn one_process_takes_the_newest_whole_one_too() {
    let (dir, newest_path) = two();
    assert_eq!(
        newest_valid(dir.path()).unwrap().checkpoint.unwrap().step(),
        20
    );
    let path = newest_path.join("rank-00001.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, &bytes).unwrap();
    // Only a full read can find this.
    assert_eq!(newest(dir.path()).unwrap().checkpoint.unwrap().step(), 20);
    let latest = newest_valid(dir.path()).unwrap();
    assert_eq!(
        (latest.checkpoint.unwrap().step(), latest.refused.len()),
        (10, 1)
    );
    fs::write(&path, &bytes[1..]).unwrap();
    let latest = newest(dir.path()).unwrap();
    assert_eq!(
        (
            latest.checkpoint.unwrap().step(),
            latest.refused[0].path.clone()
        ),
        (10, newest_path)
    );
}
