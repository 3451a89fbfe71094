use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;

use super::{masking_config::MaskingConfig, sentences::SentencesConfig};
use crate::{
    error::DataError,
    index_cache::IndexEvent,
    megatron::{
        documents::DocumentRange,
        mid_level::{MidLevelConfig, MidLevelDataset},
    },
    tokenizer::Tokenizer,
};

/// Builds the samples of masked sentences of a [kind](MaskedKind): a
/// [`BertDataset`](crate::BertDataset) or a [`T5Dataset`](crate::T5Dataset).
#[derive(Clone, Debug)]
pub struct MaskedDatasetConfig<K> {
    pub(super) sentences: SentencesConfig,
    pub(super) masking: MaskingConfig,
    /// The settings that only this kind has.
    pub(super) kind: K,
}

/// A kind of masked samples, with the settings that only it has.
pub trait MaskedKind: Clone + Debug {
    /// The samples.
    type Dataset: MidLevelDataset;

    /// Opens the samples of `source` with the settings of all kinds and those of this one.
    ///
    /// # Errors
    /// As [`MaskedDatasetConfig::build`].
    fn build(
        config: &MaskedDatasetConfig<Self>,
        source: &DocumentRange,
        report: &mut dyn FnMut(IndexEvent),
    ) -> Result<Self::Dataset, DataError>;
}

impl<K> MaskedDatasetConfig<K> {
    pub(super) fn with_kind(
        seq_len: usize,
        tokenizer: Arc<dyn Tokenizer>,
        cache: &Path,
        masking: MaskingConfig,
        kind: K,
    ) -> Self {
        Self {
            sentences: SentencesConfig::new(seq_len, tokenizer, cache),
            masking,
            kind,
        }
    }

    /// The seed of the order and of the masks, below 2^31 - 1. Default: 1234, as in Megatron-LM.
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.sentences.seed = seed;
        self
    }

    /// Reads the documents as many epochs as this number of samples needs. All samples of the last
    /// epoch count, so there may be more.
    pub fn with_num_samples(mut self, num_samples: u64) -> Self {
        self.sentences.num_samples = Some(num_samples);
        self
    }

    /// The probability that a sample is cut to a random length. Default: 0.1, as in Megatron-LM.
    pub fn with_short_sequence_probability(mut self, probability: f64) -> Self {
        self.sentences.short_sequence_probability = probability;
        self
    }

    /// Which tokens are masked. Default: 15% of the tokens, for BERT in n-grams of up to 3 whole
    /// words, for T5 in n-grams of up to 10, whose number is drawn from a geometric distribution.
    pub fn with_masking(self, masking: MaskingConfig) -> Self {
        Self { masking, ..self }
    }
}

impl<K: MaskedKind> MaskedDatasetConfig<K> {
    /// Opens the mapping of the samples, which is built if it is not in the folder; `report` is
    /// called with what happens. One process builds, and others wait for it.
    ///
    /// Building needs 4 bytes of memory for each sentence, 16 for each document and 12 for each
    /// sample.
    ///
    /// # Errors
    /// - A setting is out of its range, or the tokenizer does not have one of the tokens.
    /// - No document has a sentence, or two for the segments of BERT's classification head.
    /// - The data set is damaged, or files cannot be read or written.
    pub fn build(
        &self,
        source: &DocumentRange,
        mut report: impl FnMut(IndexEvent),
    ) -> Result<K::Dataset, DataError> {
        self.masking.check()?;
        K::build(self, source, &mut report)
    }
}

impl<K: MaskedKind> MidLevelConfig for MaskedDatasetConfig<K> {
    type Source = DocumentRange;
    type Dataset = K::Dataset;

    fn with_samples_of(mut self, num_samples: Option<u64>) -> Self {
        self.sentences.num_samples = num_samples;
        self
    }

    fn num_samples(&self) -> Option<u64> {
        self.sentences.num_samples
    }

    fn cache(&self) -> &Path {
        &self.sentences.cache
    }

    fn name_of(source: &DocumentRange) -> String {
        source.name()
    }

    fn build_for_blend(
        &self,
        source: &DocumentRange,
        report: &mut dyn FnMut(IndexEvent),
    ) -> Result<K::Dataset, DataError> {
        self.build(source, report)
    }
}
