//! Prepares the folder of checkpoints at the start of a run.

use std::{fs, path::Path};

use megaburn_collective::Group;

use crate::{
    agree::settle,
    error::{CheckpointError, IoContext},
    folder::{checkpoint_step, entries, is_left},
    hosts::{check::check_folders, promote::promote},
    manifest::rank_of_file,
    owner::{is_of_run, unmark},
    paths::{PART, REPLACED, is_there, leftover_of, sync_dir},
    place::Place,
    unfinished::remove_marked,
};

/// Creates the folder if it does not exist, and removes what a crash left behind: folders with a
/// temporary name and mark of a save. If each host has a folder of its own, checks that, and
/// completes a checkpoint that was about to get its name on all hosts. Call it when a run starts, before loading or saving.
///
/// # Errors
/// The folder cannot be created or read, on any rank; two hosts have the same folder.
/// # Collective
/// All ranks of `world`; rank 0 does the work, or the first rank of each host.
pub fn prepare(place: impl Into<Place>, world: &Group) -> Result<(), CheckpointError> {
    let place = place.into();
    let dir = place.dir();
    let create = || fs::create_dir_all(dir).during("create the folder", dir);
    let is_keeper = place.is_keeper(world);
    settle(world, if is_keeper { create() } else { Ok(()) })?;
    check_folders(&place, world)?;
    promote(&place, world)?;
    settle(world, if is_keeper { clean(dir) } else { Ok(()) })
}

fn clean(dir: &Path) -> Result<(), CheckpointError> {
    if let Some(parent) = dir.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        sync_dir(parent)?;
    }
    for (name, path) in entries(dir)? {
        if checkpoint_step(&name).is_some() {
            // The run was killed just before or after the checkpoint got this name.
            if is_of_run(&path) {
                unmark(&path).during("remove the owner mark of an ended run in", &path)?;
            }
            remove_parts(&path)?;
            continue;
        }
        let leftover = leftover_of(&name).filter(|(of, _)| checkpoint_step(of).is_some());
        let Some((of, suffix)) = leftover.filter(|_| is_left(&path)) else {
            continue;
        };
        let target = dir.join(of);
        // After a crash between the two renames of a replacement, only the old checkpoint exists.
        if suffix == REPLACED && !is_there(&target) {
            fs::rename(&path, &target).during("restore", &path)?;
            unmark(&target).during("remove the owner mark of an ended run in", &target)?;
        } else {
            remove_marked(&path);
        }
    }
    sync_dir(dir)
}

/// Removes files of a checkpoint that were still being copied from another host.
fn remove_parts(checkpoint: &Path) -> Result<(), CheckpointError> {
    for entry in fs::read_dir(checkpoint).during("read the folder", checkpoint)? {
        let path = entry.during("read the folder", checkpoint)?.path();
        let name = path.file_name().map(|name| name.to_string_lossy());
        let whole = name.as_deref().and_then(|name| name.strip_suffix(PART));
        if whole.and_then(rank_of_file).is_some() {
            fs::remove_file(&path).during("remove", &path)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::{
        owner::Mark,
        testing::{make, names},
    };

    #[test]
    fn leftovers_are_removed_and_what_only_has_such_a_name_stays() {
        let dir = tempfile::tempdir().unwrap();
        let here = dir.path();
        let left = [
            "step-00000002.tmp-1-2",
            "step-00000001.trash-7-8",
            "step-00000001.replaced-1-2",
        ];
        let replaced = ["step-00000001", "step-00000009.replaced-1-2"];
        for name in left.into_iter().chain(replaced) {
            Mark::of_run(&make(here, name)).unwrap();
        }
        drop(Mark::of_process(&make(here, "step-00000004.tmp-1-3")).unwrap());
        fs::create_dir(here.join("step-00000002.tmp-1-4")).unwrap();
        // Unmarked folders, other names, and a conversion in progress.
        let stay = [
            "notes",
            "other.tmp-1-2",
            "step-00000001.replaced-good",
            "step-00000003.tmp-1-2",
            "step-00000005.replaced-1-2",
            "step-00000500.tmp-copy",
        ];
        let stay = stay.map(|name| make(here, name));
        let converts = make(here, "step-00000000.tmp-1-2");
        let _mark = Mark::of_process(&converts).unwrap();
        Mark::of_run(&stay[5]).unwrap();
        prepare(here, &Group::single(0)).unwrap();
        let name = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().to_string();
        let mut expected: Vec<_> = stay.iter().chain([&converts]).map(name).collect();
        expected.extend(["step-00000001", "step-00000009"].map(String::from));
        expected.sort();
        assert_eq!(names(here), expected);
        let restored = fs::read_to_string(here.join("step-00000009/weights")).unwrap();
        assert_eq!(restored, "step-00000009.replaced-1-2");
        assert_eq!(names(&here.join("step-00000001")), ["weights"]);
        assert_eq!(names(&here.join("step-00000009")), ["weights"]);
    }
}
