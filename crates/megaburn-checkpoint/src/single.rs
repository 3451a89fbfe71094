use std::{
    fs::{self, OpenOptions},
    io::Write,
    path::{Component, Path},
};

use megaburn_collective::Progress;

use crate::{
    CheckpointError, NamedTensor, Snapshot,
    error::IoContext,
    hf::ASSETS,
    manifest::{MANIFEST, MANIFEST_HASH},
    save::{merge, write_manifest, write_share},
    staging::{Target, sync_dir},
};

/// Writes an ordinary checkpoint of one process to exactly `path`, which then opens as any other:
/// [`Checkpoint::open`](crate::Checkpoint::open). `layout` is the layout that the manifest names,
/// and `extra_files` (relative path, bytes) are put beside the manifest.
///
/// It is written to a folder beside `path` (`path.tmp-…`, which only a kill leaves behind), synced
/// and renamed; the values of one tensor at a time are in memory. What stands at `path` is replaced
/// only with `force`, only when the new one is whole, and only if it is a checkpoint or an empty
/// folder.
///
/// # Errors
/// Something that is not to be replaced; tensors that are not whole, a tensor's own error, a full
/// disk. Then nothing of the new one stays, and what stood there is untouched.
pub fn save_single<'a>(
    path: &Path,
    force: bool,
    snapshot: &Snapshot,
    layout: &str,
    tensors: impl IntoIterator<Item = NamedTensor<'a>>,
    extra_files: &[(String, Vec<u8>)],
) -> Result<(), CheckpointError> {
    let target = Target { path, force, what: "checkpoint", mark: MANIFEST, is_part };
    let staging = target.stage()?;
    let report = write_share(&staging.path, 0, tensors, &Progress::none())?;
    let manifest = merge(snapshot, layout.to_string(), vec![report])?;
    write_manifest(&staging.path, &manifest)?;
    write_extra(&staging.path, extra_files)?;
    target.commit(staging)
}

/// Whether a checkpoint's folder may hold this name.
fn is_part(name: &str) -> bool {
    let is_rank = name.starts_with("rank-") && name.ends_with(".safetensors");
    is_rank || [MANIFEST, MANIFEST_HASH, ASSETS].contains(&name)
}

/// Puts files into a folder in the making; none that is already there is overwritten.
pub(crate) fn write_extra(
    folder: &Path,
    files: &[(String, Vec<u8>)],
) -> Result<(), CheckpointError> {
    for (relative, bytes) in files {
        let is_name = |part: Component<'_>| matches!(part, Component::Normal(_));
        if relative.is_empty() || !Path::new(relative).components().all(is_name) {
            return Err(CheckpointError::OutsidePath { path: relative.clone() });
        }
        let path = folder.join(relative);
        let above = path.parent().expect("it is inside the folder");
        fs::create_dir_all(above).during("make the folder", above)?;
        let write = || {
            let mut file = OpenOptions::new().write(true).create_new(true).open(&path)?;
            file.write_all(bytes)?;
            file.sync_all()
        };
        write().during("write", &path)?;
        for above in path.ancestors().skip(1).take_while(|above| above.starts_with(folder)) {
            sync_dir(above)?;
        }
    }
    Ok(())
}
