use std::path::PathBuf;

use xxhash_rust::xxh3::xxh3_64;

use super::{
    chunks::Chunk,
    files::{PackedFiles, VERSION},
    pack::{BinSize, Packing},
    stats::PackingStats,
};
use crate::{
    dataset::TokenDataset,
    epoch_order::EpochOrder,
    error::DataError,
    index_cache::IndexEvent,
    samples::{Sample, Samples},
};

/// Builds a [`PackedSampler`].
///
/// ```
/// use megaburn_data::{ByteTokenizer, Corpus, PackedSamplerConfig, Sample, Samples, TokenDataset};
///
/// let documents = ["short", "a longer one", "tiny"].map(String::from).to_vec();
/// let set = TokenDataset::new(&Corpus::from_documents("notes", documents)?, &ByteTokenizer)?;
/// let config = PackedSamplerConfig::new(16).with_multiple(4).with_shuffle(42, 0);
/// let samples = config.init(&set, |event| eprintln!("{event:?}"))?;
/// assert_eq!(samples.num_samples(), 2);
/// assert_eq!(samples.stats().num_documents, 3);
/// assert!(matches!(samples.sample(0)?, Sample::Documents(_)));
/// # Ok::<(), megaburn_data::DataError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedSamplerConfig {
    seq_len: usize,
    multiple: usize,
    cache: Option<PathBuf>,
    shuffle: Option<(u64, usize)>,
}

impl PackedSamplerConfig {
    /// Samples of `seq_len` positions.
    pub fn new(seq_len: usize) -> Self {
        Self {
            seq_len,
            multiple: 1,
            cache: None,
            shuffle: None,
        }
    }

    /// Each document takes a multiple of this number of positions. It must divide the sequence
    /// length. Default: 1, without padding between documents.
    pub fn with_multiple(self, multiple: usize) -> Self {
        Self { multiple, ..self }
    }

    /// Keeps the packing of a data set on disk in the folder `cache`, which is created if it is
    /// missing, so that it is built once per host and takes no memory. It should be on a disk of the
    /// host, or on a file system with locks. By default, and for tokens in memory, the packing is
    /// kept in memory: 12 bytes for each document and 12 for each sample.
    pub fn with_cache(self, cache: impl Into<PathBuf>) -> Self {
        Self {
            cache: Some(cache.into()),
            ..self
        }
    }

    /// Reshuffles the samples in each epoch, for training. Data set `number` of a mixture has another
    /// order than others of its size. By default all epochs read the samples in the order in which
    /// their longest documents are in the data set.
    pub fn with_shuffle(self, seed: u64, number: usize) -> Self {
        Self {
            shuffle: Some((seed, number)),
            ..self
        }
    }

    /// Packs the documents of a data set. With a cache, the packing is opened if it is there, or
    /// one process builds it and others wait; `report` is called with what happens.
    ///
    /// Packing needs 12 bytes of memory for each document and up to 24 for each sample. A document
    /// that is longer than a sample counts once for each sample that it fills.
    ///
    /// # Errors
    /// - `seq_len` is 0, too large or not a multiple of the multiple of documents, which may not be
    ///   0.
    /// - No document has two tokens.
    /// - The data set is damaged, or files cannot be read or written.
    pub fn init(
        &self,
        dataset: &TokenDataset,
        mut report: impl FnMut(IndexEvent),
    ) -> Result<PackedSampler, DataError> {
        let size = self.size()?;
        let bins = match (&self.cache, dataset.on_disk()) {
            (Some(cache), Some(place)) => {
                let files = PackedFiles::open(cache, dataset, place, size, &mut report)?;
                PackedBins::Files(files)
            }
            _ => PackedBins::Memory(Packing::new(dataset, size)?),
        };
        let num_samples = bins.stats().num_samples;
        Ok(PackedSampler {
            dataset: dataset.clone(),
            bins,
            multiple: size.multiple,
            order: match self.shuffle {
                Some((seed, number)) => EpochOrder::shuffled(num_samples, seed, number),
                None => EpochOrder::sequential(num_samples),
            },
        })
    }

    fn size(&self) -> Result<BinSize, DataError> {
        let (seq_len, multiple) = (self.seq_len, self.multiple);
        for (what, number) in [
            ("the sequence length", seq_len),
            ("the multiple of positions of a document", multiple),
        ] {
            if number == 0 {
                return Err(DataError::Zero { what });
            }
        }
        if seq_len % multiple != 0 {
            return Err(DataError::PackMultiple { seq_len, multiple });
        }
        let Ok(seq_len) = u32::try_from(seq_len) else {
            return Err(DataError::OrderSize {
                why: format!("the sequence length {seq_len} is above {}", u32::MAX),
            });
        };
        Ok(BinSize {
            seq_len,
            // It divides a number of 32 bits.
            multiple: multiple as u32,
        })
    }
}

/// Samples that are filled with whole documents: an unlimited sequence, in which each epoch reads
/// every document once.
///
/// A sample has [`Sample::Documents`], in whose positions no document is cut that fits into a
/// sample. A longer one is cut into parts that overlap by one token, so that every token but the
/// first one of a document is a label once in an epoch. Which documents share a sample is the same
/// in all epochs, and does not depend on the seed.
///
/// Source: Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (arXiv 2404.10830).
#[derive(Debug)]
pub struct PackedSampler {
    dataset: TokenDataset,
    bins: PackedBins,
    multiple: u32,
    order: EpochOrder,
}

/// Where the bins are.
#[derive(Debug)]
enum PackedBins {
    Memory(Packing),
    Files(PackedFiles),
}

impl PackedBins {
    fn stats(&self) -> &PackingStats {
        match self {
            Self::Memory(packing) => packing.stats(),
            Self::Files(files) => files.stats(),
        }
    }

    fn bin(&self, index: u64) -> Result<Vec<Chunk>, DataError> {
        match self {
            Self::Memory(packing) => Ok(packing.bin(index as usize).collect()),
            Self::Files(files) => files.bin(index),
        }
    }
}

impl PackedSampler {
    /// The data set that is sampled.
    pub fn dataset(&self) -> &TokenDataset {
        &self.dataset
    }

    /// What packing made of the documents.
    pub fn stats(&self) -> &PackingStats {
        self.bins.stats()
    }

    /// The epoch of sample `index`, and its number among the samples of an epoch without shuffling.
    pub fn position(&self, index: u64) -> (u64, u64) {
        self.order.position(index)
    }
}

impl Samples for PackedSampler {
    /// Number of samples of an epoch.
    fn num_samples(&self) -> u64 {
        self.order.num_samples()
    }

    /// The order depends on how documents are packed.
    fn order_hash(&self) -> u64 {
        xxh3_64(format!("best fit {VERSION} {}", self.multiple).as_bytes())
    }

    fn sample(&self, index: u64) -> Result<Sample, DataError> {
        let (_, bin) = self.position(index);
        let chunks = self.bins.bin(bin)?.into_iter();
        let documents = chunks.map(
            |Chunk {
                 first_token,
                 num_labels,
             }| {
                let end = first_token + u64::from(num_labels) + 1;
                self.dataset.tokens_at(first_token..end)
            },
        );
        Ok(Sample::Documents(documents.collect::<Result<_, _>>()?))
    }
}
