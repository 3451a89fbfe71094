use std::path::Path;
use std::sync::Arc;

use super::{
    masking::Masking,
    masking_config::MaskingConfig,
    pieces::{Pieces, padding, special},
    sentences::{SentenceSample, SentenceSamples, SentencesConfig},
};
use crate::{
    error::DataError,
    index_cache::IndexEvent,
    megatron::{
        documents::DocumentRange,
        mid_level::{MidLevelConfig, MidLevelDataset},
    },
    tokenizer::Tokenizer,
};

/// The label of a position of the decoder that is padding.
const NO_LABEL: i64 = -1;

/// Builds a [`T5Dataset`]. The defaults are those of Megatron-LM's `pretrain_t5.py`.
#[derive(Clone, Debug)]
pub struct T5DatasetConfig {
    sentences: SentencesConfig,
    decoder_seq_len: usize,
    masking: MaskingConfig,
    bos: Option<String>,
    eos: Option<String>,
    sentinels: Option<Vec<String>>,
}

/// The samples of Megatron-LM's `T5MaskedWordPieceDataset`.
///
/// A sample has consecutive sentences of a document, of which spans are masked. The encoder reads
/// the rest, with a sentinel in place of each span; the decoder predicts each sentinel and the
/// tokens of its span. Sample `index` is a function of the seed and `index`.
#[derive(Debug)]
pub struct T5Dataset {
    samples: SentenceSamples,
    seq_len: usize,
    decoder_seq_len: usize,
    pieces: Pieces,
    masking: Masking,
    sentinels: Vec<u32>,
    bos: u32,
    eos: u32,
    pad: i64,
}

/// A sample of T5. The vectors of the encoder have its sequence length, the others that of the
/// decoder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct T5Sample {
    /// The tokens of the encoder; 0 in place of padding.
    pub text_enc: Vec<u32>,
    /// The tokens of the decoder, from the one that begins a text on; 0 in place of padding.
    pub text_dec: Vec<u32>,
    /// The tokens that the decoder predicts, up to the one that ends a text; then -1.
    pub labels: Vec<i64>,
    /// Whether a position of the decoder counts in the loss, because it is no padding.
    pub loss_mask: Vec<bool>,
    /// Whether tokens of the sentences were left out.
    pub truncated: bool,
    /// Whether a position of the encoder has a token, and no padding.
    pub enc_mask: Vec<bool>,
    /// Whether a position of the decoder has a token, and no padding.
    pub dec_mask: Vec<bool>,
}

impl T5DatasetConfig {
    /// Samples of `seq_len` tokens for the encoder and `decoder_seq_len` for the decoder, of which
    /// as many are made as one epoch has. `tokenizer` is the one that encoded the data. The mapping
    /// of the samples is kept in the folder `cache`, which is created if it is missing. It should
    /// be on a disk of the host, or on a file system with locks.
    pub fn new(
        seq_len: usize,
        decoder_seq_len: usize,
        tokenizer: Arc<dyn Tokenizer>,
        cache: impl AsRef<Path>,
    ) -> Self {
        Self {
            sentences: SentencesConfig::new(seq_len, tokenizer, cache.as_ref()),
            decoder_seq_len,
            masking: MaskingConfig::new(0.15)
                .with_max_ngram(10)
                .with_geometric(true),
            bos: None,
            eos: None,
            sentinels: None,
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

    /// Which spans are masked. Default: 15% of the tokens, in spans of up to 10 whole words, whose
    /// number is drawn from a geometric distribution.
    pub fn with_masking(self, masking: MaskingConfig) -> Self {
        Self { masking, ..self }
    }

    /// The spelling of the token that begins the decoder's text. Default: `[BOS]`; else the
    /// tokenizer's, or if it has none the one that pads, as in T5.
    pub fn with_bos(self, bos: impl Into<String>) -> Self {
        let bos = Some(bos.into());
        Self { bos, ..self }
    }

    /// The spelling of the token that ends the decoder's text. Default: `[EOS]`, else the
    /// tokenizer's.
    pub fn with_eos(self, eos: impl Into<String>) -> Self {
        let eos = Some(eos.into());
        Self { eos, ..self }
    }

    /// The spellings of the sentinels, in their order. Default: `<extra_id_0>`, `<extra_id_1>` and
    /// so on, as far as the tokenizer has them.
    pub fn with_sentinels(self, sentinels: impl IntoIterator<Item = String>) -> Self {
        let sentinels = Some(sentinels.into_iter().collect());
        Self { sentinels, ..self }
    }

    /// Opens the mapping of the samples, which is built if it is not in the folder; `report` is
    /// called with what happens. One process builds, and others wait for it.
    ///
    /// Building needs 4 bytes of memory for each sentence, 16 for each document and 12 for each
    /// sample.
    ///
    /// # Errors
    /// - A setting is out of its range, or the tokenizer does not have one of the tokens.
    /// - No document has a sentence.
    /// - The data set is damaged, or files cannot be read or written.
    pub fn build(
        &self,
        source: &DocumentRange,
        mut report: impl FnMut(IndexEvent),
    ) -> Result<T5Dataset, DataError> {
        self.masking.check()?;
        let tokenizer = self.sentences.tokenizer.as_ref();
        let bad = |why: &str| DataError::MaskedSamples { why: why.into() };
        if self.decoder_seq_len < 2 {
            return Err(bad(&format!(
                "the decoder's sequence length {} has no space for a sentinel; give at least 2",
                self.decoder_seq_len
            )));
        }
        let id = |spelling: &str| tokenizer.token_to_id(spelling);
        let bos = match &self.bos {
            Some(bos) => Some(special(tokenizer, bos, "begins the decoder's text (bos)")?),
            None => id("[BOS]").or(tokenizer.bos()).or(tokenizer.pad()),
        };
        let bos = bos.ok_or_else(|| {
            bad(
                "the tokenizer has no token that begins the decoder's text; name one of its \
                vocabulary as bos",
            )
        })?;
        let eos = match &self.eos {
            Some(eos) => special(tokenizer, eos, "ends the decoder's text (eos)")?,
            None => id("[EOS]").unwrap_or(tokenizer.eos()),
        };
        let sentinels = self.sentinels(tokenizer)?;
        let pieces = Pieces::new(tokenizer)?;
        let separators = [id("[CLS]"), id("[SEP]")];
        let samples = self.sentences.build(source, 2, 1, &mut report)?;
        Ok(T5Dataset {
            samples,
            seq_len: self.sentences.seq_len,
            decoder_seq_len: self.decoder_seq_len,
            pieces,
            masking: Masking::new(&self.masking, separators),
            sentinels,
            bos,
            eos,
            pad: padding(
                tokenizer,
                &[Some(bos), Some(eos), separators[0], separators[1]],
            ),
        })
    }

    fn sentinels(&self, tokenizer: &dyn Tokenizer) -> Result<Vec<u32>, DataError> {
        let role = "stands for a masked span (sentinel)";
        if let Some(sentinels) = &self.sentinels
            && !sentinels.is_empty()
        {
            let ids = sentinels.iter();
            return ids.map(|token| special(tokenizer, token, role)).collect();
        }
        let first = special(tokenizer, "<extra_id_0>", role)?;
        let others = (1..).map_while(|number| {
            let spelling = format!("<extra_id_{number}>");
            tokenizer.token_to_id(&spelling)
        });
        Ok([first].into_iter().chain(others).collect())
    }
}

impl MidLevelConfig for T5DatasetConfig {
    type Source = DocumentRange;
    type Dataset = T5Dataset;

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
    ) -> Result<T5Dataset, DataError> {
        self.build(source, report)
    }
}

impl MidLevelDataset for T5Dataset {
    type Sample = T5Sample;

    fn size(&self) -> u64 {
        self.num_samples()
    }

    fn hash_of_order(&self) -> u64 {
        self.order_hash()
    }

    fn read(&self, index: u64) -> Result<T5Sample, DataError> {
        self.sample(index)
    }
}

impl T5Dataset {
    /// Number of samples.
    pub fn num_samples(&self) -> u64 {
        self.samples.num_samples()
    }

    /// A hash of what decides the order in addition to the data and the settings: the number of
    /// epochs.
    pub fn order_hash(&self) -> u64 {
        self.samples.order_hash()
    }

    /// The documents that are read.
    pub fn source(&self) -> &DocumentRange {
        self.samples.source()
    }

    /// Sample `index`.
    ///
    /// # Errors
    /// There is no such sample, files cannot be read, or they hold tokens outside the vocabulary.
    /// More spans were masked than there are sentinels, or more tokens than the decoder can have.
    pub fn sample(&self, index: u64) -> Result<T5Sample, DataError> {
        let SentenceSample {
            sentences,
            target_len,
            mut random,
        } = self.samples.sample(index, &self.pieces)?;
        let mut tokens = sentences.concat();
        let truncated = tokens.len() > target_len;
        tokens.truncate(target_len);
        let pieces = &self.pieces;
        let spans = self
            .masking
            .spans(&tokens, target_len, pieces, &mut random, |_, _| ());
        let bad = |why: String| DataError::MaskedSamples { why };
        if spans.len() > self.sentinels.len() {
            return Err(bad(format!(
                "sample {index} of {} has {} masked spans, and the tokenizer only {} sentinels; give \
                it more (`<extra_id_N>`), a shorter sequence (data.seq_len) or a lower probability \
                of masking",
                self.source().name(),
                spans.len(),
                self.sentinels.len(),
            )));
        }

        let mut text_enc = Vec::with_capacity(self.seq_len);
        let mut decoded = Vec::new();
        let mut begin = 0;
        for (span, sentinel) in spans.iter().zip(&self.sentinels) {
            // A span has at least one position.
            let (first, last) = (span[0], span[span.len() - 1]);
            text_enc.extend(&tokens[begin..first]);
            text_enc.push(*sentinel);
            decoded.push(*sentinel);
            decoded.extend(span.iter().map(|position| tokens[*position]));
            begin = last + 1;
        }
        text_enc.extend(&tokens[begin..]);
        let num_decoded = decoded.len() + 1;
        if num_decoded > self.decoder_seq_len {
            return Err(bad(format!(
                "sample {index} of {} has {num_decoded} tokens for the decoder, whose sequence length \
                is {}; give a longer one, or a lower probability of masking",
                self.source().name(),
                self.decoder_seq_len,
            )));
        }

        let text_dec = [&[self.bos], decoded.as_slice()].concat();
        let mut labels: Vec<i64> = decoded.into_iter().map(i64::from).collect();
        labels.push(i64::from(self.eos));
        labels.resize(self.decoder_seq_len, NO_LABEL);
        for label in &mut labels {
            // Megatron-LM writes 0 in place of labels that look like padding.
            if *label == self.pad {
                *label = 0;
            }
        }
        let mut loss_mask = vec![false; self.decoder_seq_len];
        loss_mask[..num_decoded].fill(true);
        let (text_enc, enc_mask) = self.padded(text_enc, self.seq_len);
        let (text_dec, dec_mask) = self.padded(text_dec, self.decoder_seq_len);
        Ok(T5Sample {
            text_enc,
            text_dec,
            labels,
            loss_mask,
            truncated,
            enc_mask,
            dec_mask,
        })
    }

    /// Pads tokens to a length, and says where there is no padding, which is 0 here.
    fn padded(&self, mut tokens: Vec<u32>, len: usize) -> (Vec<u32>, Vec<bool>) {
        let is_text = |token: &u32| i64::from(*token) != self.pad;
        let mut mask: Vec<bool> = tokens.iter().map(is_text).collect();
        mask.resize(len, false);
        tokens.resize(len, 0);
        for (token, is_text) in tokens.iter_mut().zip(&mask) {
            *token *= u32::from(*is_text);
        }
        (tokens, mask)
    }
}
