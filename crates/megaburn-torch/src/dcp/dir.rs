use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::dcp::metadata::{DcpChunk, DcpTensor, Metadata, Place};
use crate::error::TorchError;
use crate::file_range::FileRange;
use crate::pickle::Pickle;
use crate::pt::PtFile;
use crate::region::{Region, copy_into, intersection, overlapping, relative};
use crate::strided::{check_region, num_elements};

/// The file that lists all entries.
pub(super) const METADATA: &str = ".metadata";

/// The most bytes of that file.
const MOST_METADATA_BYTES: u64 = 1 << 31;

/// The number of files that stay open.
const MOST_OPEN_FILES: usize = 64;

/// A folder that `torch.distributed.checkpoint` wrote, such as one of torchtitan or FSDP.
///
/// Opening it reads the list of entries. Tensors are read by region, whatever the ranks that wrote
/// them held.
#[derive(Debug)]
pub struct DcpDir {
    path: PathBuf,
    tensors: BTreeMap<String, DcpTensor>,
    objects: BTreeMap<String, Place>,
    reshaped: BTreeSet<String>,
    files: Mutex<HashMap<String, FileRange>>,
}

impl DcpDir {
    /// Opens a folder and reads its `.metadata`.
    ///
    /// # Errors
    /// The file is missing, cannot be read, is damaged or of another kind.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, TorchError> {
        let path = path.as_ref().to_path_buf();
        let file = path.join(METADATA);
        if !file.exists() && path.join(format!("__0{METADATA}")).exists() {
            return Err(TorchError::OtherKind {
                path,
                why: "each rank wrote metadata of its own; save it with use_collectives=True"
                    .into(),
            });
        }
        let range = FileRange::open(&file)?;
        if range.len() > MOST_METADATA_BYTES {
            return Err(range.damaged(format!("it has {} bytes", range.len())));
        }
        let pickle = Pickle::read(&range.bytes()?).map_err(|source| TorchError::Pickle {
            path: file.clone(),
            entry: String::new(),
            source,
        })?;
        let metadata = Metadata::of(&pickle, &file)?;
        Ok(Self {
            path,
            tensors: metadata.tensors,
            objects: metadata.objects,
            reshaped: metadata.reshaped,
            files: Mutex::default(),
        })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All tensors with their names, in the order of the names.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&str, &DcpTensor)> {
        self.tensors
            .iter()
            .map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// The tensors that Megatron-Core before 0.14 stored in another shape than their own.
    pub(crate) fn reshaped(&self) -> &BTreeSet<String> {
        &self.reshaped
    }

    /// A tensor.
    ///
    /// # Errors
    /// There is none of this name.
    pub fn tensor(&self, name: &str) -> Result<&DcpTensor, TorchError> {
        let tensor = self.tensors.get(name);
        tensor.ok_or_else(|| self.missing("tensor", name, self.tensors.len()))
    }

    /// The names of the objects that are no tensors, in order.
    pub fn objects(&self) -> impl ExactSizeIterator<Item = &str> {
        self.objects.keys().map(|name| name.as_str())
    }

    /// Reads an object. Its value is the [root](PtFile::root) of the file that was saved for it.
    ///
    /// # Errors
    /// There is none of this name, or its file cannot be read.
    pub fn object(&self, name: &str) -> Result<PtFile, TorchError> {
        let place = self.objects.get(name);
        let place = place.ok_or_else(|| self.missing("object", name, self.objects.len()))?;
        let file = self
            .range(place)
            .and_then(|range| PtFile::open_range(&range));
        file.map_err(|source| entry_error(name, source))
    }

    /// Reads a whole tensor in row-major order, in little-endian bytes.
    ///
    /// # Errors
    /// As for [`Self::read_region`].
    pub fn read(&self, name: &str) -> Result<Vec<u8>, TorchError> {
        let shape = self.tensor(name)?.shape();
        self.read_region(name, &vec![0; shape.len()], shape)
    }

    /// Reads a region of a tensor in row-major order. Only the chunks that have a part of it are
    /// opened, and only those parts are read.
    ///
    /// # Errors
    /// There is no such tensor, the region is not inside it, a part is in no chunk or in two, or a
    /// file is missing, damaged or cannot be read.
    pub fn read_region(
        &self,
        name: &str,
        offsets: &[usize],
        sizes: &[usize],
    ) -> Result<Vec<u8>, TorchError> {
        let tensor = self.tensor(name)?;
        let error = |why: String| TorchError::Tensor {
            path: self.path.clone(),
            name: name.into(),
            why,
        };
        check_region(tensor.shape(), offsets, sizes).map_err(error)?;
        let item = tensor.dtype().num_bytes();
        let count = num_elements(sizes).unwrap_or(0);
        if count == 0 {
            return Ok(Vec::new());
        }
        let parts: Vec<(&DcpChunk, Region)> = tensor
            .chunks()
            .iter()
            .filter_map(|chunk| {
                let part = intersection((offsets, sizes), (chunk.offsets(), chunk.sizes()));
                Some((chunk, part?))
            })
            .collect();
        let boxes: Vec<_> = parts.iter().map(|(_, part)| part.clone()).collect();
        if let Some((one, other)) = overlapping(&boxes) {
            let at = |index: usize| parts[index].0.offsets();
            let why = format!("its chunks at {:?} and {:?} overlap", at(one), at(other));
            return Err(error(why));
        }
        let covered = boxes.iter().filter_map(|(_, sizes)| num_elements(sizes));
        let covered: usize = covered.sum();
        if covered < count {
            return Err(error(format!(
                "of the {count} elements from {offsets:?} with the sizes {sizes:?}, {} are in no \
                chunk",
                count - covered
            )));
        }
        // The files have to be there before memory is taken for what they hold.
        let ranges: Result<Vec<FileRange>, TorchError> = parts
            .iter()
            .map(|(chunk, _)| self.range(&chunk.place))
            .collect();
        let ranges = ranges.map_err(|source| entry_error(name, source))?;
        let mut found = Vec::new();
        for (range, (chunk, (starts, lens))) in ranges.iter().zip(&parts) {
            let part = read_chunk(tensor, chunk, range, starts, lens);
            let part = part.map_err(|source| entry_error(name, source))?;
            if lens == sizes {
                return Ok(part);
            }
            if found.is_empty() {
                found = vec![0; count * item];
            }
            let starts = relative(starts, offsets);
            copy_into(&mut found, sizes, &part, &starts, lens, item);
        }
        Ok(found)
    }

    /// The bytes of an entry.
    fn range(&self, place: &Place) -> Result<FileRange, TorchError> {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let file = match files.get(&*place.file) {
            Some(file) => file.clone(),
            None => {
                let file = FileRange::open(&self.path.join(&*place.file))?;
                if files.len() == MOST_OPEN_FILES {
                    files.clear();
                }
                files.insert(place.file.to_string(), file.clone());
                file
            }
        };
        let range = file.part(place.offset..place.offset + place.len);
        range.ok_or_else(|| {
            file.damaged(format!(
                "the entry is bytes {} to {}, and the file has {}",
                place.offset,
                place.offset + place.len,
                file.len()
            ))
        })
    }

    fn missing(&self, kind: &'static str, name: &str, count: usize) -> TorchError {
        TorchError::Missing {
            path: self.path.clone(),
            kind,
            name: name.into(),
            count,
        }
    }
}

/// Reads a box of the tensor that is all in one chunk.
fn read_chunk(
    tensor: &DcpTensor,
    chunk: &DcpChunk,
    range: &FileRange,
    starts: &[usize],
    lens: &[usize],
) -> Result<Vec<u8>, TorchError> {
    let file = PtFile::open_range(range)?;
    let stored = file.tensor(file.root())?;
    let stored =
        stored.filter(|stored| stored.dtype() == tensor.dtype() && stored.shape() == chunk.sizes());
    let stored = stored.ok_or_else(|| {
        range.damaged(format!(
            "at its place is {} instead of a tensor of {} with the sizes {:?}",
            file.root(),
            tensor.dtype(),
            chunk.sizes()
        ))
    })?;
    file.read_region(&stored, &relative(starts, chunk.offsets()), lens)
}

fn entry_error(name: &str, source: TorchError) -> TorchError {
    TorchError::Entry {
        name: name.into(),
        source: Box::new(source),
    }
}
