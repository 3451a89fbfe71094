use std::path::{Path, PathBuf};

use burn::module::Module;
use burn_store::{BurnpackStore, PytorchStore, SafetensorsStore};
use megaburn_collective::Group;
use megaburn_parallel::Sharded;

use crate::{
    error::RecordsError,
    layout::Layout,
    load::load_from_ignoring,
    save::{full_tensors, write_burnpack, write_safetensors},
};

/// A file of a full module, whose format follows from its name.
///
/// Its tensors are those of the plain module: every matrix in full, without the padding of a
/// vocabulary.
#[derive(Clone, Debug)]
pub struct RecordFile {
    path: PathBuf,
    layout: Option<Layout>,
    overwrite: bool,
    ignored: Vec<String>,
}

enum Format {
    Burnpack,
    Safetensors,
    Torch,
}

impl RecordFile {
    /// The file at `path`.
    pub fn new(path: impl AsRef<Path>) -> Self {
        Self {
            path: path.as_ref().to_path_buf(),
            layout: None,
            overwrite: false,
            ignored: Vec::new(),
        }
    }

    /// The layout of the tensors. By default, `.pt`, `.pth` and `.bin` have PyTorch's layout, the others
    /// Burn's.
    #[must_use]
    pub fn with_layout(mut self, layout: Layout) -> Self {
        self.layout = Some(layout);
        self
    }

    /// Ignores tensors of the file whose names end with one of these, e.g. `position_ids`: they are
    /// not the module's.
    #[must_use]
    pub fn with_ignored<N: Into<String>>(mut self, names: impl IntoIterator<Item = N>) -> Self {
        self.ignored.extend(names.into_iter().map(Into::into));
        self
    }

    /// Whether [`save`](Self::save) may replace a file.
    #[must_use]
    pub fn with_overwrite(mut self, overwrite: bool) -> Self {
        self.overwrite = overwrite;
        self
    }

    /// Reads the file into this rank's shards.
    ///
    /// # Errors
    /// The file cannot be read, or is not of this module; see [`load_from`](crate::load_from).
    /// # Collective
    /// Nothing is sent. Every rank reads the file, of which it needs a path of its own.
    pub fn load<M: Module + Sharded>(&self, module: M) -> Result<M, RecordsError> {
        let (format, layout) = self.format()?;
        let ignored: Vec<&str> = self.ignored.iter().map(String::as_str).collect();
        let loaded = match format {
            Format::Burnpack => {
                let mut store = BurnpackStore::from_file(&self.path).auto_extension(false);
                load_from_ignoring(module, &mut store, layout, &ignored)
            }
            Format::Safetensors => {
                let mut store = SafetensorsStore::from_file(&self.path);
                load_from_ignoring(module, &mut store, layout, &ignored)
            }
            Format::Torch => {
                let mut store = PytorchStore::from_file(&self.path);
                load_from_ignoring(module, &mut store, layout, &ignored)
            }
        };
        loaded.map_err(|error| match error {
            RecordsError::File { action, why, .. } => RecordsError::File {
                action,
                what: self.path.display().to_string(),
                why,
            },
            error => error,
        })
    }

    /// Writes the full module, gathered tensor by tensor to rank 0, which writes the file.
    ///
    /// The file takes its name when it is complete. With data parallelism each tensor-parallel group
    /// has the same module: let the one whose data-parallel rank is 0 save it. If several groups
    /// write with [`with_overwrite`](Self::with_overwrite), the last one to finish replaces the file.
    ///
    /// # Errors
    /// On every rank, if rank 0 cannot write the file; `group` is not the group that splits the
    /// module. See also [`CollectiveError`](megaburn_collective::CollectiveError).
    /// # Collective
    /// All members of `group`.
    pub fn save<M: Module + Sharded>(&self, module: &M, group: &Group) -> Result<(), RecordsError> {
        let (format, layout) = self.format()?;
        if matches!(format, Format::Torch) {
            let path = self.path.clone();
            return Err(RecordsError::TorchIsReadOnly { path });
        }
        let tensors = full_tensors(module, layout, group)?;
        let written = tensors.written(|tensors| match format {
            Format::Safetensors => write_safetensors(tensors, &self.path, (layout, self.overwrite)),
            _ => write_burnpack(tensors, &self.path, self.overwrite),
        });
        written.map(drop)
    }

    fn format(&self) -> Result<(Format, Layout), RecordsError> {
        let path = || self.path.clone();
        let extension = self.path.extension().unwrap_or_default().to_string_lossy();
        let (format, layout) = match &*extension {
            "bpk" => (Format::Burnpack, Layout::Burn),
            "safetensors" => (Format::Safetensors, Layout::Burn),
            "pt" | "pth" | "bin" => (Format::Torch, Layout::Torch),
            "mpk" | "gz" => {
                return Err(RecordsError::OldRecorder {
                    path: path(),
                    extension: extension.into_owned(),
                });
            }
            _ => return Err(RecordsError::Format { path: path() }),
        };
        Ok((format, self.layout.unwrap_or(layout)))
    }
}
