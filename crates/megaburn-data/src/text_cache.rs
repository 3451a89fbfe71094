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
mod tests {
    use std::thread::scope;

    use rstest::rstest;

    use super::*;
    use crate::{corpus::Corpus, part::fuse, tokenizer::ByteTokenizer};

    fn all(set: &TokenDataset) -> Vec<u32> {
        set.sample(set.num_tokens() as usize - 1, 0).unwrap()
    }

    #[rstest]
    #[case("a.txt", "\u{FEFF}one text\r\nwith lines\n\0 and é\n")]
    #[case(
        "b.jsonl",
        "{\"text\": \"ab\"}\n\n{\"text\": \"\"}\n{\"text\": \"c\\r\\nd\"}\n"
    )]
    #[case("c.json", "[{\"text\": \"ab\"}, {\"text\": \"\"}, {\"text\": \"c\"}]")]
    #[case("d.json", "\u{FEFF}{\"text\": \"é\"}\n{\"text\": \"e\u{301}\"}")]
    fn a_cached_text_is_that_in_memory(#[case] name: &str, #[case] text: &str) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        let corpus = Corpus::from_file(&path).unwrap();
        let in_memory = TokenDataset::new(&corpus, &ByteTokenizer).unwrap();
        let expected = all(&in_memory);
        let cache = TextCache::new(dir.path().join("cache"));
        let mut events = Vec::new();
        let first = cache.open(&path, &ByteTokenizer, |event| events.push(event));
        assert_eq!(all(&first.unwrap()), expected);
        assert!(
            matches!(events[0], TextCacheEvent::Encoding { num_bytes, .. }
            if num_bytes == text.len() as u64)
        );
        let again = cache.open(&path, &ByteTokenizer, |event| panic!("{event:?}"));
        let again = again.unwrap();
        assert_eq!(all(&again), expected);
        assert_eq!(again.name(), path.display().to_string());
        assert_eq!(again.bytes_per_token(), in_memory.bytes_per_token());
        assert_eq!(again.fingerprint().unwrap(), corpus.hash());
        assert_eq!(in_memory.fingerprint().unwrap(), corpus.hash());
    }

    #[rstest]
    #[case::any_text("a.txt", false)]
    #[case("a", false)]
    #[case("A.TXT", false)]
    #[case("a.jsonl", false)]
    #[case("a.NDJSON", false)]
    #[case("a.json", false)]
    #[case("a.txt.gz", true)]
    #[case("a.jsonl.GZ", true)]
    #[case("a.json.Zst", true)]
    #[case("a.gz", true)]
    #[case("a.gz.txt", false)]
    #[case("a.parquet", true)]
    #[case("a.PARQUET", true)]
    #[case("gz", false)]
    fn large_texts_and_those_that_are_unpacked_need_a_cache(
        #[case] name: &str,
        #[case] is_needed: bool,
    ) {
        let name = Path::new("folder.gz").join(name);
        let most = TextCache::MAX_BYTES_IN_MEMORY;
        assert_eq!(TextCache::is_needed(&name, 0), is_needed);
        assert_eq!(TextCache::is_needed(&name, most), is_needed);
        assert!(TextCache::is_needed(&name, most + 1));
    }

    #[test]
    fn a_changed_text_is_encoded_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.txt");
        let cache = TextCache::new(dir.path().join("cache"));
        for text in ["first", "the second text"] {
            fs::write(&path, text).unwrap();
            let set = cache.open(&path, &ByteTokenizer, |_| ()).unwrap();
            assert_eq!(all(&set), text.bytes().map(u32::from).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_text_may_have_any_name() {
        let dir = tempfile::tempdir().unwrap();
        let cache = TextCache::new(dir.path().join("cache"));
        let long = "é".repeat(125);
        for name in [
            long.as_str(),
            "a.bin.txt",
            ".txt",
            "two\nlines",
            "*.idx.text",
        ] {
            let path = dir.path().join(name);
            fs::write(&path, name).unwrap();
            for _ in 0..2 {
                let set = cache.open(&path, &ByteTokenizer, |_| ()).unwrap();
                assert_eq!(set.num_tokens(), name.len() as u64);
            }
        }
    }

    #[test]
    fn a_text_that_is_changed_while_it_is_encoded_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.txt");
        let text = "some text ".repeat(100_000);
        fs::write(&path, &text).unwrap();
        let cache = TextCache::new(dir.path().join("cache"));
        let error = cache.open(&path, &ByteTokenizer, |event| {
            if let TextCacheEvent::Encoding { .. } = event {
                fs::write(&path, text.replace('o', "ö")).unwrap();
            }
        });
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("a.txt` was changed while it was encoded; start again"),
            "{error}"
        );
        let set = cache.open(&path, &ByteTokenizer, |_| ()).unwrap();
        assert_eq!(set.num_tokens(), 1_100_000);
    }

    #[test]
    fn many_processes_encode_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.txt");
        fs::write(&path, "some text ".repeat(20_000)).unwrap();
        let cache = TextCache::new(dir.path().join("cache"));
        let counts = scope(|scope| {
            let open = || {
                let (mut num_bytes, mut num_told) = (0, 0);
                let set = cache.open(&path, &ByteTokenizer, |event| match event {
                    TextCacheEvent::Encoded(more) => num_bytes += more,
                    TextCacheEvent::Encoding { .. } => num_told += 1,
                    TextCacheEvent::Waiting => {}
                });
                assert_eq!(set.unwrap().num_tokens(), 200_000);
                (num_bytes, num_told)
            };
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(open)).collect();
            let counts = threads.into_iter().map(|thread| thread.join().unwrap());
            counts.collect::<Vec<(u64, usize)>>()
        });
        assert_eq!(
            counts.iter().map(|(bytes, _)| bytes).sum::<u64>(),
            200_000,
            "{counts:?}"
        );
        assert_eq!(
            counts.iter().map(|(_, told)| told).sum::<usize>(),
            1,
            "{counts:?}"
        );
    }

    #[rstest]
    #[case("a.txt", "", "is empty; give a text")]
    #[case("a.jsonl", "{\"text\": \"a\"}\n{\"txt\": \"b\"}\n", "line 2")]
    #[case("a.jsonl", "\n\n", "is empty; give a text")]
    fn a_text_that_cannot_be_used_is_named(
        #[case] name: &str,
        #[case] text: &str,
        #[case] message: &str,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        let cache = TextCache::new(dir.path().join("cache"));
        for _ in 0..2 {
            let error = cache.open(&path, &ByteTokenizer, |_| ()).unwrap_err();
            let error = error.to_string();
            assert!(error.contains(message) && error.contains(name), "{error}");
            assert!(!error.contains("--"), "a run has no such flag: {error}");
        }
    }

    /// A cached text, one of whose files is damaged, or something that is in its way.
    #[rstest]
    #[case::cut_tokens(".bin", Some("cu"), "it has 2 bytes, and its index ends at 8")]
    #[case::no_tokens(".bin", None, ".bin`: it does not exist")]
    #[case::other_index(".idx", Some("no index"), "it is shorter than")]
    #[case::no_index(".idx", None, ".bin`: it exists, and others of its files do not")]
    #[case::no_description(".megaburn", None, "its description is missing")]
    #[case::cut_description(".megaburn", Some("{"), "its description is missing")]
    fn a_damaged_cache_says_what_to_remove(
        #[case] ending: &str,
        #[case] content: Option<&str>,
        #[case] why: &str,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.txt");
        fs::write(&path, "abc").unwrap();
        let cache = TextCache::new(dir.path().join("cache"));
        let open = || cache.open(&path, &ByteTokenizer, |_| ());
        let expected = all(&open().unwrap());
        let prefix = cache.prefix_of(&path, &ByteTokenizer).unwrap();
        let damaged = with_ending(&prefix, ending);
        match content {
            Some(content) => fs::write(damaged, content).unwrap(),
            None => fs::remove_file(damaged).unwrap(),
        }
        let error = open().unwrap_err().to_string();
        let remedy = format!("remove `{}.*`", prefix.display());
        assert!(error.contains(why) && error.contains(&remedy), "{error}");
        assert!(!error.contains("--force"), "{error}");
        for entry in fs::read_dir(dir.path().join("cache")).unwrap() {
            fs::remove_file(entry.unwrap().path()).unwrap();
        }
        assert_eq!(all(&open().unwrap()), expected);
    }

    #[test]
    fn what_a_killed_process_left_is_removed_and_what_is_of_others_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.txt");
        fs::write(&path, "abc").unwrap();
        let cache = TextCache::new(dir.path().join("cache"));
        let open = || cache.open(&path, &ByteTokenizer, |_| ());
        let prefix = cache.prefix_of(&path, &ByteTokenizer).unwrap();
        let index = with_ending(&prefix, ".idx");
        let part = with_ending(&prefix, ".megaburn-part");
        let mut left = 0;
        for operations in 0.. {
            fuse::allow(dir.path(), operations);
            let found = open();
            fuse::remove(dir.path());
            left += usize::from(part.exists() && index.exists());
            let is_whole = found.is_ok() && !part.exists();
            assert_eq!(all(&open().unwrap()), [97, 98, 99]);
            assert!(!part.exists(), "{operations}");
            if is_whole {
                break;
            }
            fs::remove_dir_all(dir.path().join("cache")).unwrap();
        }
        assert!(left > 3, "only {left} were left");
        fs::create_dir(&part).unwrap();
        fs::write(part.join("0.bin"), "mine").unwrap();
        assert_eq!(all(&open().unwrap()), [97, 98, 99]);
        assert_eq!(fs::read(part.join("0.bin")).unwrap(), b"mine");
    }

    #[rstest]
    #[case::a_file(".megaburn-part", false, "it cannot be read: Not a directory")]
    #[case::a_folder(".bin", true, ".bin`: it exists, and others of its files do not")]
    #[case::a_folder_as_index(".idx", true, "it cannot be read: is a directory")]
    fn what_is_in_the_way_is_named_and_stays(
        #[case] ending: &str,
        #[case] is_folder: bool,
        #[case] why: &str,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.txt");
        fs::write(&path, "abc").unwrap();
        let cache = TextCache::new(dir.path().join("cache"));
        fs::create_dir(dir.path().join("cache")).unwrap();
        let prefix = cache.prefix_of(&path, &ByteTokenizer).unwrap();
        let other = with_ending(&prefix, ending);
        match is_folder {
            true => fs::create_dir(&other).unwrap(),
            false => fs::write(&other, "mine").unwrap(),
        }
        let error = cache.open(&path, &ByteTokenizer, |_| ()).unwrap_err();
        let error = error.to_string();
        let remedy = format!("remove `{}.*`", prefix.display());
        assert!(error.contains(why) && error.contains(&remedy), "{error}");
        assert!(other.exists());
    }

    #[test]
    fn the_cache_and_the_text_must_be_what_they_are_named_for() {
        let dir = tempfile::tempdir().unwrap();
        let [text, file] = ["a.txt", "cache"].map(|name| dir.path().join(name));
        fs::write(&text, "abc").unwrap();
        fs::write(&file, "abc").unwrap();
        let refusal = |cache: &Path, text: &Path| {
            let opened = TextCache::new(cache).open(text, &ByteTokenizer, |_| ());
            opened.unwrap_err().to_string()
        };
        let found = refusal(&file, &text);
        assert!(
            found.contains("cache` in the cache cannot be written"),
            "{found}"
        );
        let cache = dir.path().join("folder");
        let found = refusal(&cache, dir.path());
        assert!(found.contains("is a directory"), "{found}");
        let found = refusal(&cache, Path::new("/dev/null"));
        assert!(found.contains("is no regular file"), "{found}");
        let found = refusal(&cache, &dir.path().join("none"));
        assert!(found.contains("does not exist"), "{found}");
    }

    #[test]
    fn unfinished_work_that_is_damaged_says_what_to_remove() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.jsonl");
        fs::write(&path, "{\"text\": \"a\"}\n").unwrap();
        let cache = TextCache::new(dir.path().join("cache"));
        let prefix = cache.prefix_of(&path, &ByteTokenizer).unwrap();
        let part = with_ending(&prefix, ".megaburn-part");
        fs::create_dir_all(&part).unwrap();
        fs::write(part.join("0.bin"), "mine").unwrap();
        let error = cache.open(&path, &ByteTokenizer, |_| ()).unwrap_err();
        let error = error.to_string();
        let remedy = format!("remove `{}.*`", prefix.display());
        assert!(
            error.contains("it has no journal") && error.contains(&remedy),
            "{error}"
        );
    }
}
