//! Saves a checkpoint from all ranks of one process to an exact path.

use std::{
    ffi::OsString,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use megaburn_collective::{Phase, ProcessGroups, objects};

use crate::{
    agree::settle,
    error::CheckpointError,
    named_tensor::{NamedTensor, Values},
    report::{merge, write_manifest},
    share::Share,
    single::{target, write_extra},
    snapshot::Snapshot,
};

/// Like [`save_single`](crate::save_single), from all ranks of a layout, which are threads of one
/// process: each writes its share to a file of its own, as [`save`](crate::save) divides them.
///
/// # Errors
/// See [`save_single`](crate::save_single). Any rank's failure is an error on every rank.
/// # Collective
/// All ranks of `groups.world`; a few messages, none with tensors. Each rank enters [`Phase::Save`]
/// and reports its progress.
pub fn save_at<'a>(
    path: &Path,
    force: bool,
    groups: &ProcessGroups,
    snapshot: &Snapshot,
    tensors: impl IntoIterator<Item = NamedTensor<'a>>,
    extra_files: &[(String, Vec<u8>)],
) -> Result<(), CheckpointError> {
    let world = &groups.world;
    let phase = world.phase(Phase::Save);
    let target = target(path, force);
    let staging = groups.is_main().then(|| target.stage()).transpose();
    let staging = settle(world, staging)?;
    let folder = staging.as_ref();
    let folder = folder.map(|staging| staging.path.as_os_str().as_bytes().to_vec());
    let folder: Option<Vec<u8>> = objects::broadcast(world, &folder)?;
    let folder = PathBuf::from(OsString::from_vec(
        folder.expect("rank 0 created the folder"),
    ));
    let never = AtomicBool::new(false);
    let read = |values: Values<'_>, range| values(range)?();
    let mine = Share::new(tensors, groups)
        .and_then(|share| share.write(&folder, world.rank(), read, phase.progress(), &never));
    let mine = settle(world, mine)?;
    let reports = objects::gather(world, &mine)?;
    let committed = staging.map(|staging| {
        let (_, text) = merge(snapshot, groups.layout().to_string(), reports)?;
        write_manifest(&staging.path, &text)?;
        write_extra(&staging.path, extra_files)?;
        target.commit(staging)
    });
    settle(world, committed.transpose())?;
    Ok(())
}
