//! Lists the checkpoints of a folder. Nothing is changed.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::SystemTime,
};

use crate::{
    checkpoint::Checkpoint,
    error::CheckpointError,
    fault::{Fault, retried},
    fetched::is_fetched,
    folder::{DAMAGED, SUSPECT, checkpoint_step, entries},
    manifest::{MANIFEST, Manifest},
    owner::{is_abandoned, is_blank, is_of_run, pid_of},
    paths::{is_there, leftover_of},
};

/// The state of a checkpoint's folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CheckpointState {
    /// The manifest is whole, and every file exists and has its full length. The files' hashes were
    /// not compared.
    Whole,
    /// A file is damaged or missing, for this reason.
    Damaged(String),
    /// The system could not read it, or another version wrote it, for this reason.
    Unreadable(String),
    /// A save or a deletion that is in progress or that was ended by a kill. The run's next start
    /// removes it.
    Unfinished,
    /// It was found damaged, and renamed ([`set_aside_damaged`](crate::set_aside_damaged)).
    SetAside,
    /// It may hold wrong values, and was renamed ([`set_aside_suspect`](crate::set_aside_suspect)).
    Suspect,
}

/// A checkpoint in a folder, or what remains of one.
#[derive(Clone, Debug, PartialEq)]
pub struct ListedCheckpoint {
    /// Its folder.
    pub path: PathBuf,
    /// The step in its name; for a checkpoint of another name, the one in its manifest.
    pub step: Option<u64>,
    /// Its state.
    pub state: CheckpointState,
    /// The manifest, if the state is [`Whole`](CheckpointState::Whole).
    pub manifest: Option<Manifest>,
    /// Bytes of all files in the folder. What a host has fetched of a file counts, not its holes.
    pub num_bytes: u64,
    /// When its manifest was written, or else when the folder was changed.
    pub saved: Option<SystemTime>,
}

/// The checkpoints in the folder `dir`, by step: committed ones, unfinished ones, and those that
/// were set aside. Other folders are left out. Manifests and lengths of files are verified,
/// hashes of files are not.
///
/// # Errors
/// The folder cannot be read.
pub fn list_checkpoints(dir: &Path) -> Result<Vec<ListedCheckpoint>, CheckpointError> {
    let mut found = Vec::new();
    for (name, path) in retried(|| entries(dir))? {
        let listed = if checkpoint_step(&name).is_some() {
            list_checkpoint(&path)
        } else if let Some((step, state)) = other_state(&name, &path) {
            let num_bytes = bytes_in(&path).unwrap_or(0);
            let saved = modified(&path);
            ListedCheckpoint {
                path,
                step: Some(step),
                state,
                manifest: None,
                num_bytes,
                saved,
            }
        } else {
            continue;
        };
        // The run may just have deleted it.
        if is_there(&listed.path) {
            found.push(listed);
        }
    }
    found.sort_by(|a, b| (a.step, &a.path).cmp(&(b.step, &b.path)));
    Ok(found)
}

/// Looks at the checkpoint in the folder `path`, which may have any name.
pub fn list_checkpoint(path: &Path) -> ListedCheckpoint {
    let name = path.file_name().and_then(|name| name.to_str());
    let (state, manifest) = match retried(|| Checkpoint::open(path)) {
        Ok(checkpoint) => (CheckpointState::Whole, Some(checkpoint.manifest().clone())),
        Err(error) => {
            let why = reason(&error);
            let state = match Fault::of(&error) {
                Fault::Damaged | Fault::Missing => CheckpointState::Damaged(why),
                Fault::Unreadable | Fault::OtherVersion => CheckpointState::Unreadable(why),
            };
            (state, None)
        }
    };
    let step = name.and_then(checkpoint_step);
    ListedCheckpoint {
        path: path.to_path_buf(),
        step: step.or(manifest.as_ref().map(|manifest| manifest.step)),
        state,
        manifest,
        num_bytes: bytes_in(path).unwrap_or(0),
        saved: modified(&path.join(MANIFEST)).or_else(|| modified(path)),
    }
}

/// Describes the damage, with the names of files instead of their paths.
fn reason(error: &CheckpointError) -> String {
    let name = |file: &Path| {
        let name = file.file_name().unwrap_or(file.as_os_str());
        name.to_string_lossy().into_owned()
    };
    match error {
        CheckpointError::Damaged { file, why } => format!("{}: {why}", name(file)),
        CheckpointError::Missing { file } => format!("{} is missing", name(file)),
        error => error.to_string(),
    }
}

/// The step and state of a folder that is not committed; `None` if a run did not make it.
fn other_state(name: &str, path: &Path) -> Option<(u64, CheckpointState)> {
    for (mark, state) in [
        (DAMAGED, CheckpointState::SetAside),
        (SUSPECT, CheckpointState::Suspect),
    ] {
        if let Some((of, suffix)) = name.rsplit_once(mark) {
            pid_of(suffix)?;
            return Some((checkpoint_step(of)?, state));
        }
    }
    let (of, _) = leftover_of(name)?;
    let step = checkpoint_step(of)?;
    (is_of_run(path) || is_abandoned(path) || is_blank(path))
        .then_some((step, CheckpointState::Unfinished))
}

/// Bytes of the files in a folder and the folders in it, without holes.
fn bytes_in(folder: &Path) -> io::Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let found = entry.metadata()?;
        bytes += match found.is_dir() {
            true => bytes_in(&entry.path())?,
            // What was not fetched is a hole. A block has 512 bytes.
            false if is_fetched(&entry.file_name()) => found.len().min(found.blocks() * 512),
            false => found.len(),
        };
    }
    Ok(bytes)
}

fn modified(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).and_then(|found| found.modified()).ok()
}

impl ListedCheckpoint {
    /// Number of files with tensors, if the manifest is whole.
    pub fn num_files(&self) -> Option<usize> {
        self.manifest.as_ref().map(|manifest| manifest.files.len())
    }
}
