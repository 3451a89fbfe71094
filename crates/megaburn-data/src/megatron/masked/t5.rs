use std::path::Path;
use std::sync::Arc;

use super::{
    config::{MaskedDatasetConfig, MaskedKind},
    masking::Masking,
    masking_config::MaskingConfig,
    pieces::{Pieces, padding, special},
    sentences::{SentenceSample, SentenceSamples},
    t5_sample::T5Sample,
};
use crate::{
    error::DataError,
    index_cache::IndexEvent,
    megatron::{documents::DocumentRange, mid_level::MidLevelDataset},
    samples::{Sample, Samples},
    tokenizer::Tokenizer,
};

/// The label of a position of the decoder that is padding.
const NO_LABEL: i64 = -1;

/// Builds a [`T5Dataset`]. The defaults are those of Megatron-LM's `pretrain_t5.py`.
pub type T5DatasetConfig = MaskedDatasetConfig<T5Settings>;

/// The settings that only the samples of T5 have.
#[derive(Clone, Debug)]
pub struct T5Settings {
    decoder_seq_len: usize,
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
        let settings = T5Settings {
            decoder_seq_len,
            bos: None,
            eos: None,
            sentinels: None,
        };
        let masking = MaskingConfig::new(0.15)
            .with_max_ngram(10)
            .with_geometric(true);
        Self::with_kind(seq_len, tokenizer, cache.as_ref(), masking, settings)
    }

    /// The token that begins the decoder's text without [`with_bos`](Self::with_bos): `[BOS]`, else
    /// the tokenizer's, or if it has none the one that pads, as in T5.
    pub fn default_bos(tokenizer: &dyn Tokenizer) -> Option<u32> {
        let bos = tokenizer.token_to_id("[BOS]");
        bos.or(tokenizer.bos()).or(tokenizer.pad())
    }

    /// The token that ends the decoder's text without [`with_eos`](Self::with_eos): `[EOS]`, else the
    /// tokenizer's.
    pub fn default_eos(tokenizer: &dyn Tokenizer) -> u32 {
        let eos = tokenizer.token_to_id("[EOS]");
        eos.unwrap_or(tokenizer.eos())
    }

    /// The sentinels in their order without [`with_sentinels`](Self::with_sentinels).
    pub fn default_sentinels(tokenizer: &dyn Tokenizer) -> Vec<u32> {
        let of = |space: &'static str| {
            let spelling = move |number: u32| format!("{space}<extra_id_{number}>");
            (0..).map_while(move |number| tokenizer.token_to_id(&spelling(number)))
        };
        let ids: Vec<u32> = of("").collect();
        if ids.is_empty() {
            // The pieces of mT5's SentencePiece model.
            return of("\u{2581}").collect();
        }
        ids
    }

    /// The spelling of the token that begins the decoder's text. Default:
    /// [`default_bos`](Self::default_bos).
    pub fn with_bos(mut self, bos: impl Into<String>) -> Self {
        self.kind.bos = Some(bos.into());
        self
    }

    /// The spelling of the token that ends the decoder's text. Default:
    /// [`default_eos`](Self::default_eos).
    pub fn with_eos(mut self, eos: impl Into<String>) -> Self {
        self.kind.eos = Some(eos.into());
        self
    }

    /// The spellings of the sentinels, in their order. Default: `<extra_id_0>`, `<extra_id_1>` and
    /// so on, as far as the tokenizer has them; if it has none, `▁<extra_id_0>` and so on, as mT5's
    /// has.
    pub fn with_sentinels(mut self, sentinels: impl IntoIterator<Item = String>) -> Self {
        self.kind.sentinels = Some(sentinels.into_iter().collect());
        self
    }
}

impl T5Settings {
    fn sentinels(&self, tokenizer: &dyn Tokenizer) -> Result<Vec<u32>, DataError> {
        let role = "stands for a masked span (sentinel)";
        if let Some(sentinels) = &self.sentinels
            && !sentinels.is_empty()
        {
            let ids = sentinels.iter();
            return ids.map(|token| special(tokenizer, token, role)).collect();
        }
        let ids = T5DatasetConfig::default_sentinels(tokenizer);
        if ids.is_empty() {
            special(tokenizer, "<extra_id_0>", role)?;
        }
        Ok(ids)
    }
}

impl MaskedKind for T5Settings {
    type Dataset = T5Dataset;

    fn build(
        config: &T5DatasetConfig,
        source: &DocumentRange,
        report: &mut dyn FnMut(IndexEvent),
    ) -> Result<T5Dataset, DataError> {
        let T5DatasetConfig {
            sentences,
            masking,
            kind,
        } = config;
        let tokenizer = sentences.tokenizer.as_ref();
        let bad = |why: &str| DataError::MaskedSamples { why: why.into() };
        if kind.decoder_seq_len < 2 {
            return Err(bad(&format!(
                "the decoder's sequence length {} has no space for a sentinel; give at least 2 \
                (data.decoder_seq_len)",
                kind.decoder_seq_len
            )));
        }
        let id = |spelling: &str| tokenizer.token_to_id(spelling);
        let bos = match &kind.bos {
            Some(bos) => Some(special(tokenizer, bos, "begins the decoder's text (bos)")?),
            None => T5DatasetConfig::default_bos(tokenizer),
        };
        let bos = bos.ok_or_else(|| {
            bad(
                "the tokenizer has no token that begins the decoder's text; name one of its \
                vocabulary as bos",
            )
        })?;
        let eos = match &kind.eos {
            Some(eos) => special(tokenizer, eos, "ends the decoder's text (eos)")?,
            None => T5DatasetConfig::default_eos(tokenizer),
        };
        let sentinels = kind.sentinels(tokenizer)?;
        let pieces = Pieces::new(tokenizer)?;
        let separators = [id("[CLS]"), id("[SEP]")];
        let samples = sentences.build(source, 2, 1, report)?;
        Ok(T5Dataset {
            samples,
            seq_len: sentences.seq_len,
            decoder_seq_len: kind.decoder_seq_len,
            pieces,
            masking: Masking::new(masking, separators),
            sentinels,
            bos,
            eos,
            pad: padding(
                tokenizer,
                &[Some(bos), Some(eos), separators[0], separators[1]],
            ),
        })
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

impl Samples for T5Dataset {
    fn num_samples(&self) -> u64 {
        self.num_samples()
    }

    fn order_hash(&self) -> u64 {
        self.order_hash()
    }

    fn sample(&self, index: u64) -> Result<Sample, DataError> {
        Ok(self.sample(index)?.into())
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
                is {}; give a longer one (data.decoder_seq_len), or a lower probability of masking",
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
