use std::collections::HashMap;

use rawzip::{CompressionMethod, RECOMMENDED_BUFFER_SIZE, ZipArchive, ZipLocator};

use crate::error::TorchError;
use crate::file_range::FileRange;

/// The most entries of an archive.
const MOST_ENTRIES: usize = 10_000_000;

/// A zip archive whose entries are stored without compression, as `torch.save` writes it.
#[derive(Debug)]
pub(crate) struct Archive {
    zip: ZipArchive<FileRange>,
    /// The entries by their names below the folder that all of them are in.
    entries: HashMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    place: rawzip::ZipArchiveEntryWayfinder,
    method: CompressionMethod,
    len: u64,
}

impl Archive {
    /// Reads the list of entries.
    ///
    /// # Errors
    /// It is no zip archive, or was cut off. It has no `data.pkl`, or two entries of one name.
    pub(crate) fn open(range: &FileRange) -> Result<Self, TorchError> {
        let zip_error = |error: rawzip::Error| range.damaged(format!("as a zip archive: {error}"));
        let mut buffer = vec![0; RECOMMENDED_BUFFER_SIZE];
        let located = ZipLocator::new().locate_in_reader(range.clone(), &mut buffer, range.len());
        let zip = located.map_err(|(_, error)| zip_error(error))?;
        let mut found = Vec::new();
        let mut listed = zip.entries(&mut buffer);
        while let Some(entry) = listed.next_entry().map_err(zip_error)? {
            if found.len() == MOST_ENTRIES {
                return Err(range.damaged("its archive has too many entries"));
            }
            let name = String::from_utf8(entry.file_path().as_ref().to_vec());
            let name = name.map_err(|_| range.damaged("the name of an entry is not UTF-8"))?;
            let entry = Entry {
                place: entry.wayfinder(),
                method: entry.compression_method(),
                len: entry.compressed_size_hint(),
            };
            found.push((name, entry));
        }
        let hint = zip.entries_hint();
        if found.len() as u64 != hint {
            let why = format!(
                "its archive lists {} entries instead of {hint}",
                found.len()
            );
            return Err(range.damaged(why));
        }
        let mut roots = found.iter().filter_map(|(name, _)| {
            let root = name.strip_suffix("data.pkl")?;
            (root.matches('/').count() == 1 && root.ends_with('/')).then_some(root)
        });
        let Some(root) = roots.next().map(String::from) else {
            return Err(TorchError::OtherKind {
                path: range.path(),
                why: "the archive has no `data.pkl`".into(),
            });
        };
        let mut entries = HashMap::with_capacity(found.len());
        for (name, entry) in found {
            let Some(below) = name.strip_prefix(&root) else {
                continue;
            };
            if entries.insert(below.to_string(), entry).is_some() {
                return Err(range.damaged(format!("its archive has two entries `{name}`")));
            }
        }
        Ok(Self { zip, entries })
    }

    /// Whether there is an entry.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// The bytes of an entry, as a range of the file; `None` if there is no such entry.
    ///
    /// # Errors
    /// The entry is compressed, or goes beyond the end.
    pub(crate) fn entry(&self, name: &str) -> Result<Option<FileRange>, TorchError> {
        let Some(entry) = self.entries.get(name) else {
            return Ok(None);
        };
        let range = self.zip.get_ref();
        if entry.method != CompressionMethod::STORE {
            return Err(TorchError::OtherKind {
                path: range.path(),
                why: format!(
                    "its entry `{name}` is compressed; unpack it and zip it with `zip -0`"
                ),
            });
        }
        let opened = self.zip.get_entry(entry.place);
        let opened =
            opened.map_err(|error| range.damaged(format!("its entry `{name}`: {error}")))?;
        let (start, end) = opened.compressed_data_range();
        let found = range
            .part(start..end)
            .filter(|found| found.len() == entry.len);
        let found = found.ok_or_else(|| {
            range.damaged(format!(
                "its entry `{name}` of {} bytes is cut off",
                entry.len
            ))
        })?;
        Ok(Some(found))
    }
}
