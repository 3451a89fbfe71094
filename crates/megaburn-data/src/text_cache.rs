//! Texts that are encoded once per host, and read from files by all later runs.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use xxhash_rust::xxh3::Xxh3;

use crate::{
    dataset::TokenDataset,
    error::DataError,
    indexed::{IndexedDataset, with_ending},
    preprocess::{PreprocessConfig, PreprocessEvent, is_read_as_is},
    remote::missing,
    tokenizer::Tokenizer,
};

/// Changes whenever the same text would be encoded into other tokens or described otherwise.
const VERSION: u64 = 2;
/// Bytes of the name of a text that the names of its files begin with.
const LONGEST_STEM: usize = 100;
/// How often a process looks whether another one has finished.
const POLL: Duration = Duration::from_millis(100);

/// A folder of encoded texts. Each is named after its file and a hash of everything that decides
/// its tokens: path, size and time of the file, and the tokenizer.
///
/// The folder may be removed at any time when no run uses it.
#[derive(Clone, Debug)]
pub struct TextCache {
    folder: PathBuf,
}

/// What a process does to open a text.
#[derive(Clone, Debug, PartialEq)]
pub enum TextCacheEvent {
    /// The text is not in the cache, so it is encoded into this data set.
    Encoding {
        /// The path without `.bin` and `.idx`.
        prefix: PathBuf,
        /// Number of bytes of the file.
        num_bytes: u64,
    },
    /// This many more bytes of the file were encoded.
    Encoded(u64),
    /// Another process encodes the text. This is reported several times a second.
    Waiting,
}

impl TextCache {
    /// Texts up to this number of bytes are encoded in memory in a few seconds.
    pub const MAX_BYTES_IN_MEMORY: u64 = 16 << 20;

    /// A cache in `folder`, which is created when a text is encoded.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        let folder = folder.into();
        Self { folder }
    }

    /// Whether a text is better encoded once into a cache than in memory at each start
    /// ([`Corpus::from_file`](crate::Corpus::from_file)), by its name and the bytes of its file. It is
    /// if the file is compressed (`.gz`, `.zst`) or a table (`.parquet`), which only a cache reads, and
    /// if it is larger than [`Self::MAX_BYTES_IN_MEMORY`]. Endings count in any case, and of two, as
    /// in `.jsonl.GZ`, the last one.
    pub fn is_needed(text: &Path, num_bytes: u64) -> bool {
        num_bytes > Self::MAX_BYTES_IN_MEMORY || !is_read_as_is(text)
    }

    /// The tokens of a text file, with the tokenizer's eos between documents. They equal those of
    /// [`Corpus::from_file`](crate::Corpus::from_file), and so do the hash
    /// ([`TokenDataset::fingerprint`]) and the number of bytes; files that end in `.gz` or `.zst` are
    /// decompressed. If the cache lacks them, one of the processes that ask encodes the text, and
    /// the others wait. Work that was interrupted is continued.
    ///
    /// # Errors
    /// The text or the cache cannot be read or written, a record of the text is bad, or the text is
    /// empty.
    pub fn open(
        &self,
        text: &Path,
        tokenizer: &dyn Tokenizer,
        mut on_event: impl FnMut(TextCacheEvent),
    ) -> Result<TokenDataset, DataError> {
        let prefix = self.prefix_of(text, tokenizer)?;
        let index = with_ending(&prefix, ".idx");
        let mut is_told = false;
        while !index.exists() {
            match self.encode(text, &prefix, tokenizer, &mut is_told, &mut on_event) {
                // Another process has the name, or has finished in the meantime.
                Err(DataError::Busy { .. }) => {
                    on_event(TextCacheEvent::Waiting);
                    sleep(POLL);
                }
                Err(DataError::Exists { .. }) if index.exists() => {}
                encoded => encoded.map_err(|error| for_run(error, &prefix))?,
            }
        }
        if with_ending(&prefix, ".megaburn-part").exists() {
            // A process was killed after it had given the files their names, or is about to remove
            // its folder. Errors are ignored: the text is complete, and nothing is written again.
            let _ = self.encode(text, &prefix, tokenizer, &mut true, &mut |_| ());
        }
        let name = text.display().to_string();
        let set = IndexedDataset::open(&prefix).map_err(|error| for_run(error, &prefix))?;
        let Some(num_tokens) = set.num_tokens().checked_sub(1) else {
            return Err(DataError::Empty { name });
        };
        let description = set.description().unwrap_or_default();
        let text_hash = description["text_xxh3"].as_str();
        let text_hash = text_hash.and_then(|hash| u64::from_str_radix(hash, 16).ok());
        let (Some(text_hash), Some(num_bytes)) = (text_hash, description["text_bytes"].as_u64())
        else {
            let why = "its description is missing, or of other files".into();
            return Err(DataError::DamagedText { prefix, why });
        };
        // The data set has an eos after the last document too.
        let set = TokenDataset::indexed(Arc::new(set), tokenizer.vocab_size());
        let set = set.part("", 0..num_tokens).with_name(name);
        Ok(set
            .with_source_hash(text_hash)
            .with_num_text_bytes(num_bytes))
    }

    fn encode(
        &self,
        text: &Path,
        prefix: &Path,
        tokenizer: &dyn Tokenizer,
        is_told: &mut bool,
        on_event: &mut dyn FnMut(TextCacheEvent),
    ) -> Result<(), DataError> {
        let created = fs::create_dir_all(&self.folder);
        created.map_err(|source| DataError::Cache {
            path: self.folder.clone(),
            source,
        })?;
        let config = PreprocessConfig::new(vec![text.into()], prefix.into());
        let config = config
            .with_append_eod(true)
            .with_plain_text(true)
            .with_text_hash(true);
        let (mut size, mut told) = (0, Some(0));
        config.run(tokenizer, |event| match event {
            PreprocessEvent::Found { num_bytes, .. } => size = num_bytes,
            // What an earlier process read does not count; the first event says how much it is.
            PreprocessEvent::Resumed(_) => told = None,
            PreprocessEvent::Progress { read_bytes, .. } => {
                if !std::mem::replace(is_told, true) {
                    let (prefix, num_bytes) = (prefix.into(), size);
                    on_event(TextCacheEvent::Encoding { prefix, num_bytes });
                }
                let before = told.unwrap_or(read_bytes);
                on_event(TextCacheEvent::Encoded(read_bytes.saturating_sub(before)));
                told = Some(before.max(read_bytes));
            }
            _ => {}
        })?;
        Ok(())
    }

    /// Where the tokens of a text are, without `.bin` and `.idx`.
    fn prefix_of(&self, text: &Path, tokenizer: &dyn Tokenizer) -> Result<PathBuf, DataError> {
        let unreadable = |source: std::io::Error| match source.kind() {
            std::io::ErrorKind::NotFound => missing(text),
            _ => DataError::Io {
                path: text.into(),
                source,
            },
        };
        let path = text.canonicalize().map_err(unreadable)?;
        let metadata = fs::metadata(&path).map_err(unreadable)?;
        if metadata.is_dir() {
            return Err(DataError::Directory { path: text.into() });
        }
        let mut hash = Xxh3::new();
        hash.update(path.as_os_str().as_encoded_bytes());
        for number in [
            VERSION,
            metadata.len(),
            metadata.mtime() as u64,
            metadata.mtime_nsec() as u64,
            tokenizer.hash(),
            tokenizer.vocab_size() as u64,
            u64::from(tokenizer.eos()),
        ] {
            hash.update(&number.to_le_bytes());
        }
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        // With its endings, the name must not be longer than file systems allow.
        let stem = &stem[..stem.floor_char_boundary(LONGEST_STEM.min(stem.len()))];
        let name = format!("{stem}-{:016x}", hash.digest());
        Ok(self.folder.join(name))
    }
}

/// The error of a data set in a cache, with a remedy for those who start runs: they have no command
/// that could be forced.
fn for_run(error: DataError, prefix: &Path) -> DataError {
    let damaged = |why: String| DataError::DamagedText {
        prefix: prefix.into(),
        why,
    };
    let named = |path: PathBuf, why: String| damaged(format!("`{}`: {why}", path.display()));
    let folder = prefix.parent().unwrap_or(prefix);
    match error {
        DataError::BadRecord { record } => DataError::BadText { record },
        DataError::Changed { path } => DataError::ChangedText { path },
        DataError::Write { path, source } => DataError::Cache { path, source },
        DataError::DamagedPart { path, why }
        | DataError::Foreign { path, why }
        | DataError::BadIndex { path, why } => named(path, why),
        DataError::OtherPart { folder, why } => named(folder, why),
        DataError::Exists { path } => {
            named(path, "it exists, and others of its files do not".into())
        }
        DataError::Missing { path } if path.starts_with(folder) => {
            named(path, "it does not exist".into())
        }
        DataError::Io { path, source } if path.starts_with(folder) => {
            named(path, format!("it cannot be read: {source}"))
        }
        DataError::OtherIndex {
            bin,
            found,
            expected,
        } => named(
            bin,
            format!("it has {found} bytes, and its index ends at {expected}"),
        ),
        other => other,
    }
}

#[cfg(test)]
mod tests;
