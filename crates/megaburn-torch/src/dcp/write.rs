use std::fs::{self, File};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

use crate::dcp::record::{DcpRecord, ObjectRecord, TensorRecord};
use crate::dtype::DType;
use crate::error::TorchError;
use crate::pickle::Tree;
use crate::pt::{PtWriter, tensor_tree};
use crate::strided::{check_region, num_elements};

/// The key of the only storage of a chunk.
const STORAGE: &str = "0";

/// Writes what one rank holds of a checkpoint: the file `__RANK_0.distcp`.
///
/// Every rank has a writer of its own. One of them then writes the metadata from the records of
/// all, with [`write_metadata`](super::write_metadata), without which the folder is no checkpoint.
/// After an error the folder has to be removed.
#[derive(Debug)]
pub struct DcpWriter {
    path: PathBuf,
    out: Counted<BufWriter<File>>,
    record: DcpRecord,
}

impl DcpWriter {
    /// Creates the file of a rank, and the folder if it is missing.
    ///
    /// # Errors
    /// The file exists, or cannot be created.
    pub fn create(folder: impl AsRef<Path>, rank: usize) -> Result<Self, TorchError> {
        let folder = folder.as_ref();
        let file = format!("__{rank}_0.distcp");
        let path = folder.join(&file);
        let created = fs::create_dir_all(folder).and_then(|()| File::create_new(&path));
        let out = created.map_err(|source| create_error(&path, source))?;
        Ok(Self {
            path,
            out: Counted {
                out: BufWriter::with_capacity(1 << 20, out),
                count: 0,
            },
            record: DcpRecord {
                file,
                tensors: Vec::new(),
                objects: Vec::new(),
            },
        })
    }

    /// Writes a box of a tensor of some global shape. `write` is given a place for its row-major,
    /// little-endian bytes.
    ///
    /// # Errors
    /// The box is not inside the shape, `write` fails or gives another number of bytes, or the file
    /// cannot be written.
    pub fn tensor(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &[usize],
        offsets: &[usize],
        sizes: &[usize],
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<(), TorchError> {
        let path = self.path.clone();
        let error = |why: String| TorchError::Write {
            path: path.clone(),
            name: name.into(),
            why,
        };
        check_region(shape, offsets, sizes).map_err(error)?;
        let len = num_elements(sizes).and_then(|count| count.checked_mul(dtype.num_bytes()));
        let len = len.ok_or_else(|| error(format!("its sizes {sizes:?} are too large")))?;
        let tree = tensor_tree(dtype, sizes, STORAGE);
        let tree = tree.map_err(|why| error(why.to_string()))?;
        let mut num_written = 0;
        let place = self.entry(&tree, |file| {
            file.storage(STORAGE, |out| {
                let mut out = Counted { out, count: 0 };
                write(&mut out)?;
                num_written = out.count;
                Ok(())
            })
        })?;
        if num_written != len as u64 {
            return Err(error(format!(
                "{num_written} bytes were given for the {len} of the sizes {sizes:?} in {dtype}"
            )));
        }
        self.record.tensors.push(TensorRecord {
            name: name.into(),
            dtype,
            shape: shape.into(),
            offsets: offsets.into(),
            sizes: sizes.into(),
            place,
        });
        Ok(())
    }

    /// Writes an object that is no tensor. If it has tensors, `storages` are their keys and bytes:
    /// see [`tensor_tree`].
    ///
    /// # Errors
    /// The file cannot be written, or a name in the value has a line break.
    pub fn object(
        &mut self,
        name: &str,
        value: &Tree,
        storages: &[(&str, &[u8])],
    ) -> Result<(), TorchError> {
        let place = self.entry(value, |file| {
            let mut storages = storages.iter();
            storages.try_for_each(|(key, bytes)| file.storage(key, |out| out.write_all(bytes)))
        })?;
        self.record.objects.push(ObjectRecord {
            name: name.into(),
            place,
        });
        Ok(())
    }

    /// Ends the file and syncs it to the disk; returns what the metadata needs.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn finish(self) -> Result<DcpRecord, TorchError> {
        let file = self
            .out
            .out
            .into_inner()
            .map_err(|error| error.into_error());
        let synced = file.and_then(|file| file.sync_all());
        synced.map_err(|source| write_error(&self.path, source))?;
        Ok(self.record)
    }

    /// Writes a file of `torch.save` at the end; returns its place and length.
    fn entry(
        &mut self,
        value: &Tree,
        write: impl FnOnce(&mut PtWriter<&mut Counted<BufWriter<File>>>) -> io::Result<()>,
    ) -> Result<[u64; 2], TorchError> {
        let start = self.out.count;
        let written = PtWriter::new(&mut self.out, value).and_then(|mut file| {
            write(&mut file)?;
            file.finish().map(|_| ())
        });
        written.map_err(|source| write_error(&self.path, source))?;
        Ok([start, self.out.count - start])
    }
}

pub(crate) fn write_error(path: &Path, source: io::Error) -> TorchError {
    TorchError::Io {
        action: "write",
        path: path.into(),
        source,
    }
}

pub(crate) fn create_error(path: &Path, source: io::Error) -> TorchError {
    match source.kind() {
        ErrorKind::AlreadyExists => TorchError::Exists { path: path.into() },
        _ => write_error(path, source),
    }
}

/// Counts what is written.
#[derive(Debug)]
struct Counted<W> {
    out: W,
    count: u64,
}

impl<W: Write> Write for Counted<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let len = self.out.write(bytes)?;
        self.count += len as u64;
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
