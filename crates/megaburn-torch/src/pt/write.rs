use std::fmt::Debug;
use std::io::{self, Write};

use rawzip::extra_fields::ExtraFieldId;
use rawzip::{Header, ZipArchiveWriter};

use crate::dtype::DType;
use crate::pickle::{Tree, write_pickle};
use crate::strided::row_major;

/// The folder of all entries, which PyTorch names so where it knows no file name.
const FOLDER: &str = "archive";

/// Storages begin at multiples of it, counted from the beginning of the archive.
const ALIGNMENT: u64 = 64;

/// The extra field that pads the header of a storage.
const PADDING: ExtraFieldId = ExtraFieldId::new(u16::from_le_bytes(*b"FB"));

/// Writes one file of `torch.save`: first the values, then the storages of their tensors.
///
/// The bytes of a storage are streamed. `torch.load` reads the file with `weights_only` too, if the
/// values are such that it allows.
#[derive(Debug)]
pub struct PtWriter<W: Write + Debug> {
    zip: ZipArchiveWriter<W>,
}

/// A tensor as a value of a file: all of a storage, in row-major order.
///
/// The storage has to be written by [`PtWriter::storage`] under the same key.
///
/// # Errors
/// The number of its elements is too large.
pub fn tensor_tree(dtype: DType, shape: &[usize], key: &str) -> io::Result<Tree> {
    let large = || io::Error::other(format!("the shape {shape:?} is too large"));
    let ints = |sizes: &[usize]| -> io::Result<Tree> {
        let ints = sizes.iter().map(|size| i64::try_from(*size).map(Tree::Int));
        let ints: Result<_, _> = ints.collect();
        ints.map(Tree::Tuple).map_err(|_| large())
    };
    let strides = row_major(shape).ok_or_else(large)?;
    let count = shape.iter().try_fold(1i64, |count, size| {
        count.checked_mul(i64::try_from(*size).ok()?)
    });
    let count = count.ok_or_else(large)?;
    let num_bytes = count
        .checked_mul(dtype.num_bytes() as i64)
        .ok_or_else(large)?;
    let (class, storage_len, function) = match dtype.storage_class() {
        Some(class) => (Tree::global("torch", class), count, "_rebuild_tensor_v2"),
        None => {
            let class = Tree::global("torch.storage", "UntypedStorage");
            (class, num_bytes, "_rebuild_tensor_v3")
        }
    };
    let storage = vec![
        "storage".into(),
        class,
        key.into(),
        "cpu".into(),
        storage_len.into(),
    ];
    let hooks = Tree::call(Tree::global("collections", "OrderedDict"), Vec::new());
    let mut args = vec![
        Tree::Persistent(Box::new(Tree::Tuple(storage))),
        0.into(),
        ints(shape)?,
        ints(&strides)?,
        false.into(),
        hooks,
    ];
    if dtype.storage_class().is_none() {
        args.push(Tree::global("torch", dtype.name()));
    }
    Ok(Tree::call(Tree::global("torch._utils", function), args))
}

impl<W: Write + Debug> PtWriter<W> {
    /// Begins a file with its values.
    ///
    /// # Errors
    /// The bytes cannot be written, or a name in the values has a line break.
    pub fn new(out: W, values: &Tree) -> io::Result<Self> {
        let pickle = write_pickle(values).map_err(io::Error::other)?;
        let mut writer = Self {
            zip: ZipArchiveWriter::new(out),
        };
        writer.entry("data.pkl", |out| out.write_all(&pickle))?;
        writer.entry("byteorder", |out| out.write_all(b"little"))?;
        Ok(writer)
    }

    /// Writes a storage, whose bytes `write` is given a place for.
    ///
    /// # Errors
    /// The bytes cannot be written, or `write` fails.
    pub fn storage(
        &mut self,
        key: &str,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<()> {
        self.entry(&format!("data/{key}"), write)
    }

    /// Ends the file; returns what it was written to.
    ///
    /// # Errors
    /// The bytes cannot be written.
    pub fn finish(mut self) -> io::Result<W> {
        self.entry("version", |out| out.write_all(b"3\n"))?;
        self.zip.finish().map_err(io::Error::other)
    }

    fn entry(
        &mut self,
        name: &str,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<()> {
        let path = format!("{FOLDER}/{name}");
        // A header has 30 bytes and the name; the header of an extra field has 4.
        let unpadded = self.zip.stream_offset() + 30 + path.len() as u64 + 4;
        let padding = unpadded.next_multiple_of(ALIGNMENT) - unpadded;
        let padding = vec![b'Z'; padding as usize];
        let builder = self.zip.new_file(path.as_str());
        let builder = builder.extra_field(PADDING, &padding, Header::LOCAL);
        let (mut entry, config) = builder
            .and_then(|builder| builder.start())
            .map_err(io::Error::other)?;
        let mut data = config.wrap(&mut entry);
        write(&mut data)?;
        let (_, descriptor) = data.finish().map_err(io::Error::other)?;
        entry.finish(descriptor).map_err(io::Error::other)?;
        Ok(())
    }
}
