use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::ErrorKind,
    ops::Range,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use burn::tensor::{DType, TensorData};
use megaburn_collective::Progress;
use serde::Deserialize;
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use crate::{
    error::{CheckpointError, IoContext},
    hex::hex,
    manifest::{FORMAT, MANIFEST, MANIFEST_HASH, Manifest, OLDEST_FORMAT, TensorInfo},
    open_file::OpenFile,
    source::{TensorHeader, TensorSource, nearest, slice_spec},
};

/// An opened checkpoint: its manifest and its tensors. Each rank reads only the slices it needs.
#[derive(Debug)]
pub struct Checkpoint {
    pub(crate) path: PathBuf,
    pub(crate) manifest: Manifest,
    /// The pieces of each tensor, as (file, piece).
    pub(crate) index: BTreeMap<String, Vec<(usize, usize)>>,
    pub(crate) files: Vec<OnceLock<OpenFile>>,
    /// The numbers of the files of which this host has only chunks, which it fetched from others.
    pub(crate) fetched: BTreeSet<usize>,
    /// Where the files are, if each host has a folder of its own.
    pub(crate) of_hosts: Option<Box<HostFiles>>,
}

/// The files of a checkpoint of which each host has some.
#[derive(Debug)]
pub(crate) struct HostFiles {
    /// The text of the manifest.
    pub(crate) manifest: String,
    /// The hosts that have each file, by its name.
    pub(crate) hosts_of_file: BTreeMap<String, BTreeSet<usize>>,
}

impl Checkpoint {
    /// Opens the checkpoint in the folder `path`. Verifies the manifest, and that every file exists
    /// and has its full length. File hashes are verified by [`find_latest`](crate::find_latest) and
    /// [`Checkpoint::verify`] instead.
    ///
    /// # Errors
    /// The manifest is missing, unreadable or damaged, or has another format version; or a file is
    /// missing or truncated.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let checkpoint = Self::open_copy(path)?;
        for file in &checkpoint.manifest.files {
            let file_path = path.join(&file.name);
            let found = fs::metadata(&file_path).during_read(&file_path)?.len();
            if found != file.bytes {
                let why = format!("it has {found} bytes of {}", file.bytes);
                return Err(CheckpointError::damaged(&file_path, why));
            }
        }
        Ok(checkpoint)
    }

    /// Like [`open`](Self::open), for a folder that may have only some of the files.
    pub(crate) fn open_copy(path: &Path) -> Result<Self, CheckpointError> {
        Ok(Self::of_manifest(path, read_manifest(path)?))
    }

    /// The checkpoint with this text of a manifest, whose files are on these hosts.
    pub(crate) fn of_hosts(
        path: &Path,
        text: String,
        hosts_of_file: BTreeMap<String, BTreeSet<usize>>,
    ) -> Result<Self, CheckpointError> {
        let manifest = parse_manifest(&path.join(MANIFEST), text.as_bytes())?;
        let of_hosts = HostFiles {
            manifest: text,
            hosts_of_file,
        };
        Ok(Self {
            of_hosts: Some(Box::new(of_hosts)),
            ..Self::of_manifest(path, manifest)
        })
    }

    fn of_manifest(path: &Path, manifest: Manifest) -> Self {
        let mut index: BTreeMap<String, Vec<(usize, usize)>> = BTreeMap::new();
        for (f, file) in manifest.files.iter().enumerate() {
            for (p, piece) in file.pieces.iter().enumerate() {
                index.entry(piece.tensor.clone()).or_default().push((f, p));
            }
        }
        let files = manifest.files.iter().map(|_| OnceLock::new()).collect();
        Self {
            path: path.to_path_buf(),
            manifest,
            index,
            files,
            fetched: BTreeSet::new(),
            of_hosts: None,
        }
    }

    /// The folder of the checkpoint.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Updates done when the checkpoint was saved.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// The model's configuration, as it was given to [`save`](crate::save).
    pub fn model(&self) -> &Value {
        &self.manifest.model
    }

    /// The trainer's state, as it was given to [`save`](crate::save).
    pub fn trainer(&self) -> &Value {
        &self.manifest.trainer
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.manifest.tensors.contains_key(name)
    }

    /// The element type in which a tensor is stored.
    ///
    /// # Errors
    /// There is no such tensor (the error names the nearest).
    pub fn dtype(&self, name: &str) -> Result<DType, CheckpointError> {
        Ok(self.info(name)?.dtype())
    }

    /// The global shape of a tensor, without padding.
    ///
    /// # Errors
    /// There is no such tensor (the error names the nearest).
    pub fn global_shape(&self, name: &str) -> Result<&[usize], CheckpointError> {
        Ok(&self.info(name)?.global_shape)
    }

    /// Verifies the hash of every file.
    ///
    /// # Errors
    /// The first file that cannot be read or whose hash differs.
    pub fn verify(&self) -> Result<(), CheckpointError> {
        self.verify_with(&Progress::none())
    }

    /// Like [`verify`](Self::verify), for a rank that others wait for: reports the bytes read to
    /// `progress`.
    ///
    /// # Errors
    /// As [`verify`](Self::verify).
    pub fn verify_with(&self, progress: &Progress) -> Result<(), CheckpointError> {
        self.verify_files(0..self.files.len(), progress)
    }

    pub(crate) fn num_files(&self) -> usize {
        self.files.len()
    }

    /// Verifies the hashes of some files.
    pub(crate) fn verify_files(
        &self,
        files: impl IntoIterator<Item = usize>,
        progress: &Progress,
    ) -> Result<(), CheckpointError> {
        let files: Vec<_> = files.into_iter().collect();
        progress.expect(
            files
                .iter()
                .map(|&file| self.manifest.files[file].bytes)
                .sum(),
        );
        files
            .into_iter()
            .try_for_each(|file| self.verify_file(file, progress))
    }

    pub(crate) fn info(&self, name: &str) -> Result<&TensorInfo, CheckpointError> {
        let tensors = &self.manifest.tensors;
        tensors
            .get(name)
            .ok_or_else(|| CheckpointError::MissingTensor {
                path: self.path.clone(),
                name: name.to_string(),
                nearest: nearest(name, tensors.keys()),
            })
    }
}

/// The id of the run that wrote the checkpoint in `folder`, if its manifest can be read and has
/// one. Nothing is verified.
pub(crate) fn run_folder_of(folder: &Path) -> Option<String> {
    let manifest: Value = serde_json::from_slice(&fs::read(folder.join(MANIFEST)).ok()?).ok()?;
    Some(manifest.get("run_id")?.as_str()?.to_string())
}

/// The version of a manifest of any version.
#[derive(Deserialize)]
struct Version {
    format: Option<u64>,
}

/// Reads and checks the manifest of the checkpoint in `folder`.
pub(crate) fn read_manifest(folder: &Path) -> Result<Manifest, CheckpointError> {
    let path = folder.join(MANIFEST);
    let text = fs::read(&path).during_read(&path)?;
    let hash_path = folder.join(MANIFEST_HASH);
    check_manifest(&path, &text, |is_known| {
        match fs::read_to_string(&hash_path) {
            // Another format version may store its hash elsewhere.
            Err(error) if !is_known && error.kind() == ErrorKind::NotFound => Ok(None),
            hash => hash.during_read(&hash_path).map(Some),
        }
    })
}

/// Checks the text of a manifest with its hash. `path` is its path or URL. `hash` reads the hash;
/// its argument says whether this version knows the manifest's format.
pub(crate) fn check_manifest(
    path: &Path,
    text: &[u8],
    hash: impl FnOnce(bool) -> Result<Option<String>, CheckpointError>,
) -> Result<Manifest, CheckpointError> {
    let damaged = |why: String| CheckpointError::damaged(path, why);
    let version: Version = serde_json::from_slice(text).map_err(|e| damaged(e.to_string()))?;
    let version = version
        .format
        .filter(|found| !(OLDEST_FORMAT..=FORMAT).contains(found));
    let hash = hash(version.is_none())?;
    // Check the hash before the version, because the version itself may be damaged.
    let found = hex(xxh3_64(text));
    if let Some(hash) = hash.filter(|hash| *hash != found) {
        return Err(damaged(format!(
            "its xxh3 is {found}, but {MANIFEST_HASH} has {hash}"
        )));
    }
    if let Some(found) = version {
        return Err(CheckpointError::UnknownVersion {
            path: path.to_path_buf(),
            found,
            supported: FORMAT,
        });
    }
    parse_manifest(path, text)
}

/// Reads and checks the text of the manifest at `path`.
fn parse_manifest(path: &Path, text: &[u8]) -> Result<Manifest, CheckpointError> {
    let damaged = |why: String| CheckpointError::damaged(path, why);
    let manifest: Manifest = serde_json::from_slice(text).map_err(|e| damaged(e.to_string()))?;
    manifest
        .check()
        .map_err(|(name, why)| damaged(format!("tensor `{name}`: {why}")))?;
    Ok(manifest)
}

/// The text of the manifest in `folder`, which is not checked.
pub(crate) fn manifest_text(folder: &Path) -> Result<String, CheckpointError> {
    let path = folder.join(MANIFEST);
    fs::read_to_string(&path).during_read(&path)
}

/// The hash of the manifest in `folder`, as the file next to it says.
pub(crate) fn manifest_hash(folder: &Path) -> Result<String, CheckpointError> {
    let path = folder.join(MANIFEST_HASH);
    fs::read_to_string(&path).during_read(&path)
}

impl TensorSource for Checkpoint {
    fn label(&self) -> String {
        self.path().display().to_string()
    }

    fn headers(&self) -> Vec<TensorHeader> {
        let header = |(name, info): (&String, &TensorInfo)| TensorHeader {
            name: name.clone(),
            dtype: info.dtype(),
            shape: info.global_shape.clone(),
        };
        self.manifest().tensors.iter().map(header).collect()
    }

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<TensorData, CheckpointError> {
        self.read(
            name,
            &slice_spec(self.global_shape(name)?, 0, [rows]),
            self.dtype(name)?,
        )
    }
}
