use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use crate::dcp::{DcpRecord, DcpWriter, create_error, write_error, write_metadata};
use crate::error::TorchError;
use crate::megatron::dir::{COMMON, CONFIG, Config, text};
use crate::megatron::names::{LATEST, ShardedKey};
use crate::pickle::Tree;
use crate::pt::PtWriter;

/// Writes a part of an object that has a part for each rank or layer, as one rank of a checkpoint.
///
/// If the value has tensors, `storages` are their keys and bytes: see
/// [`tensor_tree`](crate::pt::tensor_tree).
///
/// # Errors
/// The file cannot be written, or a name in the value has a line break.
pub fn write_sharded_object(
    writer: &mut DcpWriter,
    key: &ShardedKey,
    value: Tree,
    storages: &[(&str, &[u8])],
) -> Result<(), TorchError> {
    writer.object(&key.to_string(), &Tree::List(vec![value]), storages)
}

/// Makes the files of all ranks a checkpoint of an iteration: writes `common.pt`, `.metadata`, and
/// `metadata.json`, without which Megatron-Core sees no checkpoint, at the end.
///
/// `common` is a dict of what all ranks have in common: `args`, `iteration`, `checkpoint_version`,
/// `optimizer`, `opt_param_scheduler` and `content_metadata` in Megatron-LM. If it has tensors,
/// `storages` are their keys and bytes. The ranks write with a [`DcpWriter`] each.
///
/// # Errors
/// The records of the ranks do not fit together, see [`write_metadata`]. A file exists, or cannot
/// be written.
pub fn write_iteration(
    folder: impl AsRef<Path>,
    records: &[DcpRecord],
    common: &Tree,
    storages: &[(&str, &[u8])],
) -> Result<(), TorchError> {
    let folder = folder.as_ref();
    let config = folder.join(CONFIG);
    if config.exists() {
        return Err(TorchError::Exists { path: config });
    }
    create(&folder.join(COMMON), |out| {
        let mut file = PtWriter::new(out, common)?;
        let mut storages = storages.iter();
        storages.try_for_each(|(key, bytes)| file.storage(key, |out| out.write_all(bytes)))?;
        file.finish().map(|_| ())
    })?;
    write_metadata(folder, records)?;
    create(&config, |out| {
        serde_json::to_writer(out, &Config::torch_dist()).map_err(io::Error::other)
    })?;
    sync(folder)
}

/// Names the newest iteration of a folder. The file gets its name by a rename, so there is always
/// one.
///
/// # Errors
/// There is a file of this name that Megatron-LM did not write, or the file cannot be written.
pub fn write_latest(folder: impl AsRef<Path>, iteration: u64) -> Result<(), TorchError> {
    let folder = folder.as_ref();
    let path = folder.join(LATEST);
    if let Some(found) = text(&path)? {
        let found = found.trim();
        if found != "release" && found.parse::<u64>().is_err() {
            return Err(TorchError::Exists { path });
        }
    }
    let unfinished = folder.join(format!("{LATEST}.tmp"));
    let written = File::create(&unfinished).and_then(|mut file| {
        file.write_all(iteration.to_string().as_bytes())?;
        file.sync_all()?;
        fs::rename(&unfinished, &path)
    });
    written.map_err(|source| write_error(&path, source))?;
    sync(folder)
}

/// Writes a new file and syncs it.
fn create(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> Result<(), TorchError> {
    let file = File::create_new(path).map_err(|source| create_error(path, source))?;
    let mut out = BufWriter::new(file);
    let written = write(&mut out).and_then(|()| {
        let file = out.into_inner().map_err(|error| error.into_error())?;
        file.sync_all()
    });
    written.map_err(|source| write_error(path, source))
}

fn sync(folder: &Path) -> Result<(), TorchError> {
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(|source| write_error(folder, source))
}
