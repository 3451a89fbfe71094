use std::io;
use std::path::{Path, PathBuf};

#[cfg(not(feature = "object-store"))]
use megaburn_store::StoreError;
use megaburn_store::{is_url, local_path_of};
use serde_json::Value;

use super::{bytes::Bytes, section::Section, with_ending};
use crate::{
    error::DataError,
    part::{description_of, hash_of},
    remote::ObjectStoreConfig,
};
#[cfg(feature = "object-store")]
use crate::{part::description_from, remote::RemoteSet};

/// Endings of texts, which are not read from URLs.
const TEXTS: [&str; 8] = [
    "jsonl", "ndjson", "json", "txt", "md", "gz", "zst", "parquet",
];

/// The files of a data set: on this host, or objects in a store with a copy of the index on this
/// host.
#[derive(Debug)]
pub(super) struct Files {
    /// The path or the URL without `.bin` and `.idx`.
    pub(super) prefix: PathBuf,
    pub(super) bin: Bytes,
    pub(super) idx: Bytes,
    pub(super) bin_bytes: u64,
    pub(super) idx_bytes: u64,
    origin: Origin,
}

#[derive(Debug)]
enum Origin {
    Local,
    #[cfg(feature = "object-store")]
    Remote {
        description: Option<String>,
        idx: PathBuf,
    },
}

impl Files {
    /// Opens the files of a path or a URL, which may be that of one of them.
    ///
    /// # Errors
    /// One is missing or cannot be read.
    pub(super) fn open(prefix: &Path, config: &ObjectStoreConfig) -> Result<Self, DataError> {
        let is_file = prefix.extension().is_some_and(|e| e == "bin" || e == "idx");
        let prefix = if is_file {
            prefix.with_extension("")
        } else {
            prefix.into()
        };
        if is_url(&prefix) {
            return Self::open_url(prefix, config);
        }
        Self::open_local(prefix)
    }

    fn open_local(prefix: PathBuf) -> Result<Self, DataError> {
        let (idx, idx_bytes) = Bytes::open(&with_ending(&prefix, ".idx"))?;
        let (bin, bin_bytes) = Bytes::open(&with_ending(&prefix, ".bin"))?;
        Ok(Self {
            prefix,
            bin,
            idx,
            bin_bytes,
            idx_bytes,
            origin: Origin::Local,
        })
    }

    fn open_url(prefix: PathBuf, config: &ObjectStoreConfig) -> Result<Self, DataError> {
        let url = prefix.display().to_string();
        let ending = prefix.extension().unwrap_or_default().to_ascii_lowercase();
        if TEXTS.iter().any(|text| ending == *text) {
            return Err(DataError::UrlOfText { url });
        }
        match local_path_of(&url, "a data set")? {
            Some(path) => Self::open_local(path),
            None => Self::open_objects(prefix, url, config),
        }
    }

    #[cfg(not(feature = "object-store"))]
    fn open_objects(_: PathBuf, url: String, _: &ObjectStoreConfig) -> Result<Self, DataError> {
        Err(StoreError::NoObjectStore { url }.into())
    }

    #[cfg(feature = "object-store")]
    fn open_objects(
        prefix: PathBuf,
        url: String,
        config: &ObjectStoreConfig,
    ) -> Result<Self, DataError> {
        let set = RemoteSet::open(&url, config)?;
        let (idx, idx_bytes) = Bytes::open(&set.idx)?;
        Ok(Self {
            prefix,
            bin_bytes: set.bin.num_bytes(),
            bin: Bytes::Object(set.bin),
            idx,
            idx_bytes,
            origin: Origin::Remote {
                description: set.description,
                idx: set.idx,
            },
        })
    }

    /// Bytes `begin..end` of the tokens.
    pub(super) fn bin_section(&self, begin: u64, end: u64) -> Section<'_> {
        Section {
            from: &self.bin,
            at: begin,
            end,
        }
    }

    /// Bytes `begin..end` of the index.
    pub(super) fn idx_section(&self, begin: u64, end: u64) -> Section<'_> {
        Section {
            from: &self.idx,
            at: begin,
            end,
        }
    }

    /// What megaburn wrote next to the data set, if it fits the size of the tokens and the hash of
    /// the index.
    pub(super) fn description(&self, index_hash: u64) -> Option<Value> {
        match &self.origin {
            Origin::Local => description_of(&self.prefix, index_hash),
            #[cfg(feature = "object-store")]
            Origin::Remote { description, .. } => {
                description_from(description.as_ref()?, self.bin_bytes, index_hash)
            }
        }
    }

    /// The hash of the index as it is now.
    ///
    /// # Errors
    /// It cannot be read.
    pub(super) fn hash_of_idx(&self) -> io::Result<u64> {
        match &self.origin {
            Origin::Local => hash_of(&with_ending(&self.prefix, ".idx")),
            #[cfg(feature = "object-store")]
            Origin::Remote { idx, .. } => hash_of(idx),
        }
    }

    /// What errors call the tokens.
    pub(super) fn bin_name(&self) -> PathBuf {
        with_ending(&self.prefix, ".bin")
    }

    /// What errors call the index.
    pub(super) fn idx_name(&self) -> PathBuf {
        let name = with_ending(&self.prefix, ".idx");
        match &self.origin {
            Origin::Local => name,
            #[cfg(feature = "object-store")]
            Origin::Remote { idx, .. } => {
                format!("{} (copied to {})", name.display(), idx.display()).into()
            }
        }
    }
}
