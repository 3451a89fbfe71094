use std::{
    fs::{self, OpenOptions},
    io::{ErrorKind, Write},
    path::{Component, Path},
    sync::atomic::AtomicBool,
};

use megaburn_collective::Progress;

use crate::{
    error::{CheckpointError, IoContext},
    hf::ASSETS,
    manifest::{MANIFEST, MANIFEST_HASH},
    named_tensor::{NamedTensor, Values},
    paths::sync_dir,
    report::{merge, write_manifest},
    share::Share,
    snapshot::Snapshot,
    target::Target,
};

/// Writes a checkpoint from a single process to exactly `path`. It can be opened like any other,
/// with [`Checkpoint::open`](crate::Checkpoint::open). `layout` is the layout that the manifest
/// names; `extra_files` (relative path, bytes) are added to the folder.
///
/// The checkpoint is written to a temporary folder next to `path` (`path.tmp-…`), synced and
/// renamed. Only a kill leaves the temporary folder behind; the next save to the same path removes
/// it. One tensor's values are in memory at a time. Existing contents of `path` are replaced only
/// with `force`, only once the new checkpoint is complete, and only if they are a checkpoint or an
/// empty folder.
///
/// # Errors
/// `path` exists and is not to be replaced, tensors are incomplete, a tensor's `data` fails, or the
/// disk is full. Then nothing of the new checkpoint remains, and what was there is unchanged.
pub fn save_single<'a>(
    path: &Path,
    force: bool,
    snapshot: &Snapshot,
    layout: &str,
    tensors: impl IntoIterator<Item = NamedTensor<'a>>,
    extra_files: &[(String, Vec<u8>)],
) -> Result<(), CheckpointError> {
    let target = target(path, force);
    let staging = target.stage()?;
    let read = |values: Values<'_>, range| values(range)?();
    let never = AtomicBool::new(false);
    let report = Share::alone(tensors)?.write(&staging.path, 0, read, &Progress::none(), &never)?;
    let (_, text) = merge(snapshot, layout.to_string(), vec![report])?;
    write_manifest(&staging.path, &text)?;
    write_extra(&staging.path, extra_files)?;
    target.commit(staging)
}

/// A checkpoint at exactly `path`.
pub(crate) fn target(path: &Path, force: bool) -> Target<'_> {
    Target {
        path,
        force,
        what: "checkpoint",
        mark: MANIFEST,
        is_part,
    }
}

/// Whether `name` may be a file in a checkpoint's folder.
fn is_part(name: &str) -> bool {
    let is_rank = name.starts_with("rank-") && name.ends_with(".safetensors");
    is_rank || [MANIFEST, MANIFEST_HASH, ASSETS].contains(&name)
}

/// Creates the folders of a relative path below `folder`, but not `folder` itself: if that is gone,
/// a signal removed it and the process is about to end.
fn make_folders(folder: &Path, relative: &str) -> Result<(), CheckpointError> {
    let mut path = folder.to_path_buf();
    for part in Path::new(relative)
        .parent()
        .into_iter()
        .flat_map(Path::components)
    {
        path.push(part);
        match fs::create_dir(&path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            made => made.during("create the folder", &path)?,
        }
    }
    Ok(())
}

/// Adds files to a folder in progress. Existing files are not overwritten.
pub(crate) fn write_extra(
    folder: &Path,
    files: &[(String, Vec<u8>)],
) -> Result<(), CheckpointError> {
    for (relative, bytes) in files {
        let is_name = |part: Component<'_>| matches!(part, Component::Normal(_));
        if relative.is_empty() || !Path::new(relative).components().all(is_name) {
            return Err(CheckpointError::OutsidePath {
                path: relative.clone(),
            });
        }
        let path = folder.join(relative);
        make_folders(folder, relative)?;
        let write = || {
            let mut file = OpenOptions::new()
                .write(true)
                .create_new(true)
                .open(&path)?;
            file.write_all(bytes)?;
            file.sync_all()
        };
        write().during("write", &path)?;
        for above in path
            .ancestors()
            .skip(1)
            .take_while(|above| above.starts_with(folder))
        {
            sync_dir(above)?;
        }
    }
    Ok(())
}
