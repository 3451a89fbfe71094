use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use crate::archive::Archive;
use crate::error::TorchError;
use crate::file_range::FileRange;
use crate::pickle::{Global, Pickle, Value};
use crate::pt::contiguous::ContiguousBytes;
use crate::pt::legacy;
use crate::pt::search::find_tensors;
use crate::pt::state_dict::is_expected;
use crate::pt::tensor::{StoredTensor, tensor_of};

/// The most bytes of a file's pickle.
const MOST_PICKLE_BYTES: u64 = 1 << 30;

/// The keys under which training programs save the state dict of their model.
const MODEL_KEYS: [&str; 4] = ["state_dict", "model_state_dict", "model", "module"];

/// The most characters of a name that are shown.
const MOST_NAME_CHARS: usize = 100;

/// A file that `torch.save` wrote: `.pt`, `.pth` or `.bin`.
///
/// The values of tensors are read from the file when they are asked for.
#[derive(Debug)]
pub struct PtFile {
    path: PathBuf,
    pickle: Pickle,
    storages: Storages,
}

#[derive(Debug)]
enum Storages {
    Zip(Archive),
    Legacy(HashMap<String, FileRange>),
}

impl PtFile {
    /// Opens a file and reads its pickle.
    ///
    /// # Errors
    /// The file cannot be read, is no file of `torch.save`, is damaged, or was saved on a
    /// big-endian machine.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, TorchError> {
        Self::open_range(&FileRange::open(path.as_ref())?)
    }

    /// Opens what `torch.save` wrote into a part of a file.
    pub(crate) fn open_range(range: &FileRange) -> Result<Self, TorchError> {
        let mut start = [0; 4];
        let is_long = range.len() >= 4;
        if is_long {
            range.fill(&mut start, 0)?;
        }
        let path = range.path();
        if is_long && start == *b"PK\x03\x04" {
            let archive = Archive::open(range)?;
            let pickle = read_pickle(range, &archive)?;
            return Ok(Self {
                path,
                pickle,
                storages: Storages::Zip(archive),
            });
        }
        if !legacy::is_legacy(range)? {
            let why = match &start {
                b"GGUF" => "it is a GGUF file",
                b"<htm" | b"<!DO" | b"vers" => "it is text, such as a page or a pointer of Git LFS",
                _ => "it begins with neither a zip archive nor PyTorch's older format",
            };
            return Err(TorchError::OtherKind {
                path,
                why: why.into(),
            });
        }
        let (pickle, storages) = legacy::open(range)?;
        Ok(Self {
            path,
            pickle,
            storages: Storages::Legacy(storages),
        })
    }

    /// What was saved, mostly a dict.
    pub fn root(&self) -> Value<'_> {
        self.pickle.root()
    }

    /// The tensors of a flat or nested state dict, each with its name. The keys of nested dicts and
    /// the numbers of elements of lists are joined by dots. A file that holds one tensor alone has
    /// it under the empty name.
    ///
    /// Tensors inside of objects, such as a whole `nn.Module` in a dict, are not found.
    ///
    /// # Errors
    /// The file holds such an object and nothing else.
    /// A tensor is of a kind that cannot be read, such as a quantized or sparse one. Two tensors
    /// have one name, or dicts are nested more than 64 deep.
    pub fn tensors(&self) -> Result<Vec<(String, StoredTensor)>, TorchError> {
        self.tensors_of(self.root())
    }

    /// The tensors of the state dict of a model, each with its name: those of the whole file, or,
    /// if it holds no tensor at its top, those under the one key of `state_dict`,
    /// `model_state_dict`, `model` and `module` that it has.
    ///
    /// # Errors
    /// As for [`Self::tensors`]; also if the file names a class or function that is no part of a
    /// state dict. It might be hostile: nothing of it was executed, and nothing of it is used.
    pub fn weights(&self) -> Result<Vec<(String, StoredTensor)>, TorchError> {
        if let Some(name) = self.strange_global(|_| false) {
            let why = format!(
                "its pickle names `{name}`, which is no part of a state dict; nothing of the file \
                was executed; if you trust who made it, save the model's `state_dict()` alone"
            );
            let path = self.path.clone();
            return Err(TorchError::OtherKind { path, why });
        }
        let root = self.root();
        let mut values = root
            .entries()
            .into_iter()
            .flat_map(|entries| entries.iter());
        if values.any(|(_, value)| tensor_of(value).is_some()) {
            return self.tensors();
        }
        let found = MODEL_KEYS.into_iter().filter_map(|key| root.get(key));
        let found: Vec<Value<'_>> = found.filter(|value| value.entries().is_some()).collect();
        match found.as_slice() {
            [model] => self.tensors_of(*model),
            _ => self.tensors(),
        }
    }

    /// A class or function that the pickle names and that is neither part of a state dict nor known
    /// to `is_known`.
    pub(crate) fn strange_global(&self, is_known: impl Fn(Global) -> bool) -> Option<String> {
        // A name with dots would reach into what a module imports.
        let is_good = |global: &Global| {
            !global.name.contains('.') && (is_expected(*global) || is_known(*global))
        };
        let strange = self.pickle.globals().find(|global| !is_good(global))?;
        Some(strange.to_string().chars().take(MOST_NAME_CHARS).collect())
    }

    /// The path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    fn tensors_of(&self, root: Value) -> Result<Vec<(String, StoredTensor)>, TorchError> {
        let is_container = root.sequence().is_some() || root.entries().is_some();
        if let (Some(object), false, Ok(None)) = (root.as_object(), is_container, self.tensor(root))
        {
            let class = object.callable;
            return Err(TorchError::OtherKind {
                path: self.path.clone(),
                why: format!("it holds an object of {class}; save the `state_dict()` of it"),
            });
        }
        let tensors = find_tensors(root);
        let tensors = tensors.map_err(|(name, why)| self.error(&name, why))?;
        let mut names = HashSet::new();
        if let Some((name, _)) = tensors.iter().find(|(name, _)| !names.insert(name)) {
            return Err(self.error(name, "another tensor has this name too".into()));
        }
        Ok(tensors)
    }

    /// The tensor that a value of the file is; `None` if it is something else.
    ///
    /// # Errors
    /// It is a tensor of a kind that cannot be read.
    pub fn tensor(&self, value: Value) -> Result<Option<StoredTensor>, TorchError> {
        let tensor = tensor_of(value).transpose();
        tensor.map_err(|why| self.error("", why))
    }

    /// Reads the values of a tensor in row-major order, in little-endian bytes.
    ///
    /// # Errors
    /// The tensor does not fit into its storage, or the file cannot be read.
    pub fn read(&self, tensor: &StoredTensor) -> Result<Vec<u8>, TorchError> {
        self.read_region(tensor, &vec![0; tensor.shape().len()], tensor.shape())
    }

    /// Reads a region of a tensor, in row-major order. Only the bytes of the region are read, and
    /// those between them where that is faster.
    ///
    /// # Errors
    /// The region is not inside the tensor, or as for [`Self::read`].
    pub fn read_region(
        &self,
        tensor: &StoredTensor,
        offsets: &[usize],
        sizes: &[usize],
    ) -> Result<Vec<u8>, TorchError> {
        let storage = self.storage(tensor)?;
        let read = tensor.layout().read(&storage, offsets, sizes);
        read.map_err(|why| self.storage_error(tensor, why))
    }

    /// Where the bytes of a tensor are in the file; `None` if they do not follow each other in
    /// row-major order.
    ///
    /// # Errors
    /// The tensor does not fit into its storage, or the file cannot be read.
    pub fn contiguous(&self, tensor: &StoredTensor) -> Result<Option<ContiguousBytes>, TorchError> {
        if !tensor.is_contiguous() {
            return Ok(None);
        }
        let storage = self.storage(tensor)?;
        let range = tensor.layout().contiguous_range();
        let range = range.map_err(|why| self.storage_error(tensor, why))?;
        let len = storage.len();
        let found = storage.part(range.clone()).ok_or_else(|| {
            let why = format!("it needs {} bytes of a storage that has {len}", range.end);
            self.storage_error(tensor, why)
        })?;
        Ok(Some(ContiguousBytes::new(found)))
    }

    fn storage(&self, tensor: &StoredTensor) -> Result<FileRange, TorchError> {
        let key = tensor.storage_key();
        let storage = match &self.storages {
            Storages::Zip(archive) => archive.entry(&format!("data/{key}"))?,
            Storages::Legacy(storages) => storages.get(key).cloned(),
        };
        storage.ok_or_else(|| self.storage_error(tensor, "the storage is missing".into()))
    }

    fn storage_error(&self, tensor: &StoredTensor, why: String) -> TorchError {
        TorchError::Storage {
            path: self.path.clone(),
            key: tensor.storage_key().into(),
            why,
        }
    }

    fn error(&self, name: &str, why: String) -> TorchError {
        TorchError::Tensor {
            path: self.path.clone(),
            name: name.into(),
            why,
        }
    }
}

fn read_pickle(range: &FileRange, archive: &Archive) -> Result<Pickle, TorchError> {
    let other = |why: &str| TorchError::OtherKind {
        path: range.path(),
        why: why.into(),
    };
    if archive.has("constants.pkl") {
        return Err(other("it is a TorchScript program; save its state_dict"));
    }
    if let Some(order) = archive.entry("byteorder")? {
        let order = order.part(0..order.len().min(16));
        let order = order.map(|order| order.bytes()).transpose()?;
        match order.as_deref() {
            Some(b"little") => {}
            Some(b"big") => return Err(TorchError::BigEndian { path: range.path() }),
            _ => return Err(range.damaged("its `byteorder` is neither little nor big")),
        }
    }
    let entry = archive.entry("data.pkl")?;
    let entry = entry.ok_or_else(|| other("the archive has no `data.pkl`"))?;
    if entry.len() > MOST_PICKLE_BYTES {
        return Err(range.damaged(format!("its `data.pkl` has {} bytes", entry.len())));
    }
    Pickle::read(&entry.bytes()?).map_err(|source| TorchError::Pickle {
        path: range.path(),
        entry: " `data.pkl`".into(),
        source,
    })
}
