use std::path::PathBuf;

/// What happens while an index of samples is opened. An index that is ready causes no event.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IndexEvent {
    /// Another process, or another thread of this one, builds an index in the folder. This one
    /// waits until it is ready.
    Waiting {
        /// The folder of the index files.
        folder: PathBuf,
    },
    /// A file of the index is not what was written, so the index is built again.
    Damaged {
        /// The file, which is replaced.
        path: PathBuf,
        /// Why the file cannot be used.
        why: String,
    },
    /// Documents are packed, which gives the index.
    Packing {
        /// What the documents are of.
        name: String,
    },
    /// Documents are divided into samples of whole sentences, which gives the index.
    Mapping {
        /// What the documents are of.
        name: String,
    },
    /// The index is built.
    Building {
        /// What the samples are made of.
        name: String,
        /// Number of samples.
        num_samples: u64,
    },
}
