use std::path::{Path, PathBuf};

use serde_json::json;
use xxhash_rust::xxh3::xxh3_64;

use super::{
    epochs::Epochs,
    gpt_index::GptIndex,
    mid_level::{MidLevelConfig, MidLevelDataset},
    sequences::SequenceRange,
};
use crate::{
    error::DataError,
    index_cache::{IndexEvent, IndexFiles, NpyFile},
    part::hex,
    samples::{Sample, Samples},
};

/// Changes when other indices are built from the same settings.
pub(super) const VERSION: u32 = 1;
/// Megatron-LM's `--seed` if none is given.
const SEED: u64 = 1234;
/// Entries of the document index that are read at a time.
const BLOCK: u64 = 1024;

/// Builds a [`GptDataset`].
///
/// ```
/// use std::sync::Arc;
/// use megaburn_data::{ByteTokenizer, GptDatasetConfig, IndexedDataset, PreprocessConfig};
/// use megaburn_data::{Samples, SequenceRange};
///
/// let dir = std::env::temp_dir().join(format!("megaburn-gpt-{}", std::process::id()));
/// std::fs::create_dir_all(&dir).unwrap();
/// std::fs::write(dir.join("a.txt"), "All happy families are alike.").unwrap();
/// PreprocessConfig::new(vec![dir.join("a.txt")], dir.join("a")).run(&ByteTokenizer, |_| ())?;
///
/// let source = SequenceRange::all(Arc::new(IndexedDataset::open(dir.join("a"))?));
/// let config = GptDatasetConfig::new(8, 260, dir.join("cache")).with_num_samples(5);
/// let samples = config.build(&source, |event| eprintln!("{event:?}"))?;
/// assert_eq!((samples.num_samples(), samples.num_epochs()), (7, 2));
/// assert_eq!(samples.tokens(0)?.len(), 9);
/// # std::fs::remove_dir_all(&dir).unwrap();
/// # Ok::<(), megaburn_data::DataError>(())
/// ```
#[derive(Clone, Debug)]
pub struct GptDatasetConfig {
    seq_len: usize,
    vocab_size: usize,
    cache: PathBuf,
    seed: u64,
    num_samples: Option<u64>,
}

/// The samples of Megatron-LM's `GPTDataset`: all sequences, in a random order, are one row of
/// tokens, which is cut into samples; these are read in a random order. The sequences are read as
/// often as the samples need.
///
/// Memory does not grow with the data set or the number of samples: tokens and entries of the
/// indices are read when a sample is.
#[derive(Debug)]
pub struct GptDataset {
    source: SequenceRange,
    seq_len: usize,
    vocab_size: usize,
    num_epochs: u64,
    separate_last_epoch: bool,
    document_index: NpyFile,
    sample_index: NpyFile,
    shuffle_index: NpyFile,
}

impl GptDatasetConfig {
    /// Samples of `seq_len + 1` tokens below `vocab_size`, of which as many are made as one epoch
    /// has. The indices are kept in the folder `cache`, which is created if it is missing. It
    /// should be on a disk of the host, or on a file system with locks.
    pub fn new(seq_len: usize, vocab_size: usize, cache: impl Into<PathBuf>) -> Self {
        Self {
            seq_len,
            vocab_size,
            cache: cache.into(),
            seed: SEED,
            num_samples: None,
        }
    }

    /// The seed of the order, below 2^32. Default: 1234, as in Megatron-LM.
    pub fn with_seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// Reads the sequences as many epochs as this number of samples needs. All samples of the last
    /// epoch count, so there may be more.
    pub fn with_num_samples(self, num_samples: u64) -> Self {
        self.with_samples_of(Some(num_samples))
    }

    /// Opens the indices of the samples, which are built if they are not in the folder; `report` is
    /// called with what happens. One process builds, and others wait for it.
    ///
    /// Building needs 4 bytes of memory for each sequence and epoch and 4 for each sequence, or 4
    /// for each sample, if that is more.
    ///
    /// # Errors
    /// - `seq_len` is 0, the seed is too large, or the sequences have no tokens.
    /// - Without a number of samples: the sequences are shorter than a sample.
    /// - The data set is damaged, or files cannot be read or written.
    pub fn build(
        &self,
        source: &SequenceRange,
        mut report: impl FnMut(IndexEvent),
    ) -> Result<GptDataset, DataError> {
        let Ok(seed) = u32::try_from(self.seed) else {
            return Err(DataError::LargeSeed { seed: self.seed });
        };
        if self.seq_len == 0 {
            let what = "the sequence length";
            return Err(DataError::Zero { what });
        }
        if self.seq_len >= i32::MAX as usize {
            let why = format!(
                "the sequence length {} (data.seq_len) is not below {}; give a shorter one",
                self.seq_len,
                i32::MAX
            );
            return Err(DataError::OrderSize { why });
        }
        let too_short = |num_tokens: u64| DataError::TooShort {
            name: source.name(),
            found: num_tokens,
            needed: self.seq_len as u64 + 1,
            seq_len: self.seq_len,
        };
        let num_tokens = source.num_tokens()?;
        if num_tokens == 0 {
            return Err(too_short(0));
        }
        let seq_len = self.seq_len as u64;
        let epochs = Epochs::new(num_tokens, seq_len, self.num_samples)?;
        if epochs.num_samples == 0 {
            return Err(too_short(num_tokens));
        }
        let index = GptIndex {
            source,
            seq_len,
            seed,
            epochs,
        };
        let sequences = source.sequences();
        // The indices depend on the lengths of the sequences and not on their tokens.
        let description = json!({
            "class": "GptDataset",
            "version": VERSION,
            "index_xxh3": hex(source.dataset().index_hash()?),
            "sequences": [sequences.start, sequences.end],
            "seq_len": seq_len,
            "seed": seed,
            "num_epochs": epochs.num_epochs,
            "separate_last_epoch": epochs.separate_from.is_some(),
        });
        let files = IndexFiles::new(&self.cache, &description, index.arrays()?);
        let building = IndexEvent::Building {
            name: source.name(),
            num_samples: epochs.num_samples,
        };
        let [document_index, sample_index, shuffle_index] =
            files.open_or_build(&mut report, building, |out| index.write(out))?;
        Ok(GptDataset {
            source: source.clone(),
            seq_len: self.seq_len,
            vocab_size: self.vocab_size,
            num_epochs: epochs.num_epochs,
            separate_last_epoch: epochs.separate_from.is_some(),
            document_index,
            sample_index,
            shuffle_index,
        })
    }
}

impl MidLevelConfig for GptDatasetConfig {
    type Source = SequenceRange;
    type Dataset = GptDataset;

    fn with_samples_of(self, num_samples: Option<u64>) -> Self {
        Self {
            num_samples,
            ..self
        }
    }

    fn num_samples(&self) -> Option<u64> {
        self.num_samples
    }

    fn cache(&self) -> &Path {
        &self.cache
    }

    fn name_of(source: &SequenceRange) -> String {
        source.name()
    }

    fn build_for_blend(
        &self,
        source: &SequenceRange,
        report: &mut dyn FnMut(IndexEvent),
    ) -> Result<GptDataset, DataError> {
        self.build(source, report)
    }
}

impl MidLevelDataset for GptDataset {
    type Sample = Sample;

    fn size(&self) -> u64 {
        self.num_samples()
    }

    fn hash_of_order(&self) -> u64 {
        self.order_hash()
    }

    fn read(&self, index: u64) -> Result<Sample, DataError> {
        self.sample(index)
    }
}

impl GptDataset {
    /// The number of times that the sequences are read.
    pub fn num_epochs(&self) -> u64 {
        self.num_epochs
    }

    /// The sequences that are read.
    pub fn source(&self) -> &SequenceRange {
        &self.source
    }

    /// Appends the tokens `begin..end` of a sequence, up to its end for `None`.
    fn append(
        &self,
        tokens: &mut Vec<u32>,
        sequence: i64,
        begin: i64,
        end: Option<i64>,
    ) -> Result<(), DataError> {
        let dataset = self.source.dataset();
        let sequence = u64::try_from(sequence).ok();
        let sequence = sequence.filter(|n| self.source.sequences().contains(n));
        let sequence = sequence.ok_or_else(|| {
            self.document_index
                .damaged("it names a sequence that the data set does not have".into())
        })?;
        let place = dataset.sequence_place(sequence)?;
        let end = end.unwrap_or(place.num_tokens as i64);
        if begin < 0 || begin > end || end as u64 > place.num_tokens {
            let num_tokens = place.num_tokens;
            return Err(self.sample_index.damaged(format!(
                "it names the tokens {begin} to {end} of sequence {sequence}, which has {num_tokens}"
            )));
        }
        let wanted = begin as u64..end as u64;
        if tokens.len() as u64 + wanted.end - wanted.start > self.seq_len as u64 + 1 {
            return Err(self.other_length());
        }
        let first = place.first_token + wanted.start;
        for (token, position) in dataset.tokens(&place, wanted)?.into_iter().zip(first..) {
            match u32::try_from(token) {
                Ok(token) if (token as usize) < self.vocab_size => tokens.push(token),
                _ => {
                    return Err(DataError::OutsideVocab {
                        name: dataset.prefix().display().to_string(),
                        token,
                        position,
                        vocab_size: self.vocab_size,
                    });
                }
            }
        }
        Ok(())
    }

    fn other_length(&self) -> DataError {
        let why = format!("a sample has not {} tokens", self.seq_len + 1);
        self.sample_index.damaged(why)
    }
}

impl Samples for GptDataset {
    /// The order depends on the number of epochs, and on whether the last one is shuffled on its
    /// own.
    fn order_hash(&self) -> u64 {
        let mut bytes = self.num_epochs.to_le_bytes().to_vec();
        bytes.push(u8::from(self.separate_last_epoch));
        xxh3_64(&bytes)
    }

    fn num_samples(&self) -> u64 {
        self.shuffle_index.rows()
    }

    fn sample(&self, index: u64) -> Result<Sample, DataError> {
        let num_samples = self.shuffle_index.rows();
        if index >= num_samples {
            return Err(DataError::NoSample {
                name: self.source.name(),
                index,
                num_samples,
            });
        }
        let sample = self.shuffle_index.numbers(index, 1)?[0];
        let in_range = u64::try_from(sample).ok().filter(|n| *n < num_samples);
        let Some(sample) = in_range else {
            let why = format!("it names sample {sample} of {num_samples}");
            return Err(self.shuffle_index.damaged(why));
        };
        // A sample ends where the next one begins.
        let places = self.sample_index.numbers(2 * sample, 4)?;
        let (begin, end) = ((places[0], places[1]), (places[2], places[3]));
        let num_documents = self.document_index.rows() as i64;
        if begin.0 < 0 || begin.0 > end.0 || end.0 >= num_documents {
            return Err(self.sample_index.damaged(format!(
                "sample {sample} begins in document {} and ends in {} of {num_documents}",
                begin.0, end.0
            )));
        }
        let mut tokens = Vec::with_capacity(self.seq_len + 1);
        let mut block = begin.0;
        while block <= end.0 {
            let count = BLOCK.min((end.0 - block) as u64 + 1);
            let documents = self.document_index.numbers(block as u64, count as usize)?;
            for (at, document) in (block..).zip(documents) {
                let first = if at == begin.0 { begin.1 } else { 0 };
                let last = (at == end.0).then(|| end.1.saturating_add(1));
                self.append(&mut tokens, document, first, last)?;
            }
            block += count as i64;
        }
        if tokens.len() != self.seq_len + 1 {
            return Err(self.other_length());
        }
        Ok(Sample::Tokens(tokens))
    }
}
