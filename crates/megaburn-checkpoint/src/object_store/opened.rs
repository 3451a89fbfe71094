use std::{
    fs::{self, File},
    path::Path,
};

use crate::{
    checkpoint::read_manifest,
    error::{CheckpointError, IoContext},
    manifest::{MANIFEST, MANIFEST_HASH, Manifest, rank_of_file},
};

/// The files of a checkpoint that a rank uploads. They are open, so that the checkpoint may be
/// deleted meanwhile.
#[derive(Debug)]
pub struct OpenedCheckpoint {
    /// The files of the rank, with their names: usually the one that it has written.
    pub(crate) own: Vec<(String, File)>,
    /// The manifest, only on rank 0.
    pub(crate) manifest: Option<OpenedManifest>,
}

/// A manifest and its files.
#[derive(Debug)]
pub(crate) struct OpenedManifest {
    pub(crate) manifest: Manifest,
    pub(crate) text: File,
    pub(crate) hash: File,
}

impl OpenedCheckpoint {
    /// Opens what rank `rank` of `num_ranks` uploads of the checkpoint in the folder `path`: the file
    /// that it has written, and those of higher ranks if more ranks have written the checkpoint.
    ///
    /// # Errors
    /// A file cannot be opened.
    pub fn open(path: &Path, rank: usize, num_ranks: usize) -> Result<Self, CheckpointError> {
        let open = |name: &str| {
            let path = path.join(name);
            File::open(&path).during_read(&path)
        };
        let mut own = Vec::new();
        for entry in fs::read_dir(path).during("read the folder", path)? {
            let name = entry.during("read the folder", path)?.file_name();
            let name = name.to_string_lossy().into_owned();
            if rank_of_file(&name).is_some_and(|writer| writer % num_ranks == rank) {
                let file = open(&name)?;
                own.push((name, file));
            }
        }
        let manifest = || {
            Ok::<_, CheckpointError>(OpenedManifest {
                manifest: read_manifest(path)?,
                text: open(MANIFEST)?,
                hash: open(MANIFEST_HASH)?,
            })
        };
        let manifest = (rank == 0).then(manifest).transpose()?;
        Ok(Self { own, manifest })
    }
}
