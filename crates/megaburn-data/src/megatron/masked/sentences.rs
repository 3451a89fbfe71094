//! Samples of whole sentences, as they are before anything is masked.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::json;
use xxhash_rust::xxh3::xxh3_64;

use super::{mapping::Mapping, pieces::Pieces};
use crate::{
    error::DataError,
    index_cache::{IndexEvent, IndexFiles, NpyFile},
    megatron::{documents::DocumentRange, random::RandomState},
    part::hex,
    tokenizer::Tokenizer,
};

/// Changes when another mapping is built from the same settings.
const VERSION: u32 = 1;
/// Megatron-LM's `--seed` if none is given.
const SEED: u64 = 1234;
/// The largest seed, to which Megatron-Core's `build_mapping` adds 1 in 32 bits.
const MOST_SEED: u64 = i32::MAX as u64 - 1;

/// What the samples of BERT and T5 are configured with alike.
#[derive(Clone, Debug)]
pub(super) struct SentencesConfig {
    pub(super) seq_len: usize,
    pub(super) tokenizer: Arc<dyn Tokenizer>,
    pub(super) cache: PathBuf,
    pub(super) seed: u64,
    pub(super) num_samples: Option<u64>,
    pub(super) short_sequence_probability: f64,
}

/// Samples of a data set.
#[derive(Debug)]
pub(super) struct SentenceSamples {
    source: DocumentRange,
    /// The numbers of the sentences of the source.
    sentences: Range<u64>,
    seed: u32,
    target_len: usize,
    sample_index: NpyFile,
}

/// The sentences of a sample.
#[derive(Debug)]
pub(super) struct SentenceSample {
    pub(super) sentences: Vec<Vec<u32>>,
    /// The number of tokens that are to be left of them.
    pub(super) target_len: usize,
    /// Decides what is done with the sample.
    pub(super) random: RandomState,
}

impl SentencesConfig {
    pub(super) fn new(seq_len: usize, tokenizer: Arc<dyn Tokenizer>, cache: &Path) -> Self {
        Self {
            seq_len,
            tokenizer,
            cache: cache.into(),
            seed: SEED,
            num_samples: None,
            short_sequence_probability: 0.1,
        }
    }

    /// Opens the mapping of the samples, which is built if it is not in the folder. A sample has
    /// `num_special` special tokens.
    pub(super) fn build(
        &self,
        source: &DocumentRange,
        num_special: usize,
        min_sentences: u64,
        report: &mut dyn FnMut(IndexEvent),
    ) -> Result<SentenceSamples, DataError> {
        let bad = |why: String| DataError::MaskedSamples { why };
        let seed = u32::try_from(self.seed).ok();
        let seed = seed.filter(|seed| u64::from(*seed) <= MOST_SEED);
        let seed = seed.ok_or_else(|| {
            bad(format!(
                "the seed {} is above {MOST_SEED}, the largest of Megatron-Core's mapping of \
                samples; choose a smaller one (run.seed)",
                self.seed
            ))
        })?;
        if self.num_samples == Some(0) {
            let what = "the number of samples";
            return Err(DataError::Zero { what });
        }
        let target_len = self.seq_len.checked_sub(num_special);
        let target_len = target_len.filter(|len| (2..i32::MAX as usize).contains(len));
        let target_len = target_len.ok_or_else(|| {
            bad(format!(
                "the sequence length {} has not space for 2 tokens of text next to {num_special} \
                special ones, or is too large; give {} to {} (data.seq_len)",
                self.seq_len,
                num_special + 2,
                i32::MAX
            ))
        })?;
        let probability = self.short_sequence_probability;
        if !(0.0..=1.0).contains(&probability) {
            return Err(bad(format!(
                "the probability of a short sample is {probability}; give one from 0 to 1, such as \
                0.1"
            )));
        }
        let ratio = if probability > 0.0 {
            (1.0 / probability).round()
        } else {
            0.0
        };
        if ratio > f64::from(i32::MAX) {
            return Err(bad(format!(
                "the probability of a short sample is {probability}, below 1 of {}; give 0 for none",
                i32::MAX
            )));
        }
        let mapping = Mapping {
            source,
            target_len: target_len as u32,
            short_ratio: ratio as u32,
            min_sentences,
            seed,
            num_samples: self.num_samples,
        };
        let documents = source.documents();
        // The mapping depends on the lengths of the sentences and not on their tokens.
        let description = json!({
            "class": "SentenceSamples",
            "version": VERSION,
            "index_xxh3": hex(source.dataset().index_hash()?),
            "documents": [documents.start, documents.end],
            "target_len": target_len,
            "short_ratio": ratio as u32,
            "min_sentences": min_sentences,
            "seed": seed,
            "num_samples": self.num_samples,
        });
        let files = IndexFiles::new(&self.cache, &description, [mapping.array()]);
        let event = IndexEvent::Mapping {
            name: source.name(),
        };
        let [sample_index] =
            files.open_or_build(report, event, |[out]: &mut [_; 1]| mapping.write(out))?;
        Ok(SentenceSamples {
            source: source.clone(),
            sentences: source.sentences()?,
            seed,
            target_len,
            sample_index,
        })
    }
}

impl SentenceSamples {
    pub(super) fn source(&self) -> &DocumentRange {
        &self.source
    }

    pub(super) fn num_samples(&self) -> u64 {
        self.sample_index.rows()
    }

    /// All samples of all epochs are shuffled together, so another number of epochs, and so of
    /// samples, is another order.
    pub(super) fn order_hash(&self) -> u64 {
        xxh3_64(&self.num_samples().to_le_bytes())
    }

    /// # Errors
    /// There is no such sample, the index is damaged, a token is not in the vocabulary, or files
    /// cannot be read.
    pub(super) fn sample(&self, index: u64, pieces: &Pieces) -> Result<SentenceSample, DataError> {
        let num_samples = self.num_samples();
        if index >= num_samples {
            return Err(DataError::NoSample {
                name: self.source.name(),
                index,
                num_samples,
            });
        }
        let row = self.sample_index.numbers(3 * index, 3)?;
        let (begin, end, target_len) = (row[0], row[1], row[2]);
        let sentences = &self.sentences;
        let is_known = begin >= sentences.start as i64
            && begin < end
            && end <= sentences.end as i64
            && (2..=self.target_len as i64).contains(&target_len);
        if !is_known {
            return Err(self.sample_index.damaged(format!(
                "sample {index} has the sentences {begin} to {end} of {sentences:?}, and \
                {target_len} of {} tokens",
                self.target_len
            )));
        }
        let read = (begin as u64..end as u64).map(|sentence| self.sentence(sentence, pieces));
        Ok(SentenceSample {
            sentences: read.collect::<Result<_, _>>()?,
            target_len: target_len as usize,
            // Megatron-LM takes the sum modulo 2^32.
            random: RandomState::new(u64::from(self.seed).wrapping_add(index) as u32),
        })
    }

    fn sentence(&self, sentence: u64, pieces: &Pieces) -> Result<Vec<u32>, DataError> {
        let dataset = self.source.dataset();
        let place = dataset.sequence_place(sentence)?;
        let tokens = dataset.tokens(&place, 0..place.num_tokens)?;
        let checked = tokens.into_iter().zip(place.first_token..);
        checked
            .map(|(token, position)| {
                let known = u32::try_from(token).ok();
                let known = known.filter(|token| pieces.continues(*token).is_some());
                known.ok_or_else(|| DataError::OutsideVocab {
                    name: dataset.prefix().display().to_string(),
                    token,
                    position,
                    vocab_size: pieces.vocab_size(),
                })
            })
            .collect()
    }
}
