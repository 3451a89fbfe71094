use std::path::Path;
use std::sync::Arc;

use super::{
    bert_sample::BertSample,
    config::{MaskedDatasetConfig, MaskedKind},
    masking::Masking,
    masking_config::MaskingConfig,
    pieces::{Pieces, padding, special},
    sentences::{SentenceSample, SentenceSamples},
};
use crate::{
    error::DataError,
    index_cache::IndexEvent,
    megatron::{documents::DocumentRange, mid_level::MidLevelDataset, random::RandomState},
    samples::{Sample, Samples},
    tokenizer::Tokenizer,
};

/// The label of a position that is not masked.
const NO_LABEL: i64 = -1;

/// Builds a [`BertDataset`]. The defaults are those of Megatron-LM's `pretrain_bert.py`.
///
/// ```
/// use std::sync::Arc;
/// use megaburn_data::{BertDatasetConfig, DocumentRange, HfTokenizer, IndexedDataset};
/// use megaburn_data::PreprocessConfig;
///
/// let dir = std::env::temp_dir().join(format!("megaburn-bert-{}", std::process::id()));
/// std::fs::create_dir_all(&dir).unwrap();
/// let vocab = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nit\nrain\n##s\n.\n";
/// std::fs::write(dir.join("vocab.txt"), vocab).unwrap();
/// std::fs::write(dir.join("a.txt"), "It rains. Rain.").unwrap();
///
/// let tokenizer = Arc::new(HfTokenizer::open(dir.join("vocab.txt"))?);
/// let encoder = PreprocessConfig::new(vec![dir.join("a.txt")], dir.join("a"));
/// encoder.with_split_sentences(true).run(tokenizer.as_ref(), |_| ())?;
///
/// let source = DocumentRange::all(Arc::new(IndexedDataset::open(dir.join("a"))?));
/// let config = BertDatasetConfig::new(12, tokenizer, dir.join("cache")).with_num_samples(3);
/// let samples = config.build(&source, |event| eprintln!("{event:?}"))?;
/// let sample = samples.sample(0)?;
/// assert_eq!((samples.num_samples(), sample.text[0], sample.text.len()), (3, 2, 12));
/// # std::fs::remove_dir_all(&dir).unwrap();
/// # Ok::<(), megaburn_data::DataError>(())
/// ```
pub type BertDatasetConfig = MaskedDatasetConfig<BertSettings>;

/// The settings that only the samples of BERT have.
#[derive(Clone, Debug)]
pub struct BertSettings {
    classification_head: bool,
    /// The spellings of the tokens that begin a sample, end a segment and replace masked tokens.
    tokens: [String; 3],
}

/// The samples of Megatron-LM's `BERTMaskedWordPieceDataset`.
///
/// A sample has consecutive sentences of a document, which are divided into the segments A and B.
/// In half of the samples B comes before A. Of the masked tokens 80% are replaced by the mask, 10%
/// by a random token, and 10% stay. Sample `index` is a function of the seed and `index`.
#[derive(Debug)]
pub struct BertDataset {
    samples: SentenceSamples,
    seq_len: usize,
    pieces: Pieces,
    masking: Masking,
    classification_head: bool,
    cls: u32,
    sep: u32,
    mask: u32,
    pad: i64,
}

impl BertDatasetConfig {
    /// Samples of `seq_len` tokens, of which as many are made as one epoch has. `tokenizer` is the
    /// one that encoded the data. The mapping of the samples is kept in the folder `cache`, which
    /// is created if it is missing. It should be on a disk of the host, or on a file system with
    /// locks.
    pub fn new(seq_len: usize, tokenizer: Arc<dyn Tokenizer>, cache: impl AsRef<Path>) -> Self {
        let settings = BertSettings {
            classification_head: true,
            tokens: ["[CLS]", "[SEP]", "[MASK]"].map(String::from),
        };
        let masking = MaskingConfig::new(0.15);
        Self::with_kind(seq_len, tokenizer, cache.as_ref(), masking, settings)
    }

    /// Whether samples have two segments, whose order the classification head predicts. Default:
    /// true. Without it, as with Megatron-LM's `--bert-no-binary-head`, all sentences are segment
    /// A.
    pub fn with_classification_head(mut self, classification_head: bool) -> Self {
        self.kind.classification_head = classification_head;
        self
    }

    /// The spellings of the tokens that begin a sample, end a segment and replace masked tokens.
    /// Default: `[CLS]`, `[SEP]` and `[MASK]`.
    pub fn with_tokens(
        mut self,
        cls: impl Into<String>,
        sep: impl Into<String>,
        mask: impl Into<String>,
    ) -> Self {
        self.kind.tokens = [cls.into(), sep.into(), mask.into()];
        self
    }
}

impl MaskedKind for BertSettings {
    type Dataset = BertDataset;

    fn build(
        config: &BertDatasetConfig,
        source: &DocumentRange,
        report: &mut dyn FnMut(IndexEvent),
    ) -> Result<BertDataset, DataError> {
        let BertDatasetConfig {
            sentences,
            masking,
            kind,
        } = config;
        let tokenizer = sentences.tokenizer.as_ref();
        let [cls, sep, mask] = &kind.tokens;
        let cls = special(tokenizer, cls, "begins a sample (cls)")?;
        let sep = special(tokenizer, sep, "ends a segment (sep)")?;
        let mask = special(tokenizer, mask, "replaces masked tokens (mask)")?;
        let pieces = Pieces::new(tokenizer)?;
        let min_sentences = if kind.classification_head { 2 } else { 1 };
        let samples = sentences.build(source, 3, min_sentences, report)?;
        Ok(BertDataset {
            samples,
            seq_len: sentences.seq_len,
            pieces,
            masking: Masking::new(masking, [Some(cls), Some(sep)]),
            classification_head: kind.classification_head,
            cls,
            sep,
            mask,
            pad: padding(tokenizer, &[Some(cls), Some(sep), Some(mask)]),
        })
    }
}

impl MidLevelDataset for BertDataset {
    type Sample = BertSample;

    fn size(&self) -> u64 {
        self.num_samples()
    }

    fn hash_of_order(&self) -> u64 {
        self.order_hash()
    }

    fn read(&self, index: u64) -> Result<BertSample, DataError> {
        self.sample(index)
    }
}

impl Samples for BertDataset {
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

impl BertDataset {
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
    pub fn sample(&self, index: u64) -> Result<BertSample, DataError> {
        let SentenceSample {
            mut sentences,
            target_len,
            mut random,
        } = self.samples.sample(index, &self.pieces)?;
        let mut pivot = sentences.len();
        let mut is_random = false;
        if self.classification_head {
            pivot = match pivot {
                0..3 => 1,
                count => 1 + random.below(count - 1),
            };
            is_random = random.uniform() < 0.5;
        }
        let second = sentences.split_off(pivot).concat();
        let mut segments = [sentences.concat(), second];
        if is_random {
            segments.reverse();
        }
        let [a, b] = segments;
        let (a, b, truncated) = truncate(&a, &b, target_len, &mut random);

        let mut tokens = [&[self.cls], a, &[self.sep]].concat();
        let first_of_b = tokens.len();
        if !b.is_empty() {
            tokens.extend(b);
            tokens.push(self.sep);
        }
        Ok(self.masked(tokens, first_of_b, target_len, random, is_random, truncated))
    }

    /// Masks and pads the tokens of a sample.
    fn masked(
        &self,
        mut tokens: Vec<u32>,
        first_of_b: usize,
        target_len: usize,
        mut random: RandomState,
        is_random: bool,
        truncated: bool,
    ) -> BertSample {
        let original = tokens.clone();
        let mut loss_mask = vec![false; self.seq_len];
        let mut labels = vec![NO_LABEL; self.seq_len];
        let replace = |position: usize, random: &mut RandomState| {
            loss_mask[position] = true;
            labels[position] = i64::from(original[position]);
            tokens[position] = self.replacement(original[position], random);
        };
        let pieces = &self.pieces;
        self.masking
            .spans(&original, target_len, pieces, &mut random, replace);

        let mut types = vec![0; self.seq_len];
        types[first_of_b..tokens.len()].fill(1);
        let is_text = |token: &u32| i64::from(*token) != self.pad;
        let mut padding_mask: Vec<bool> = tokens.iter().map(is_text).collect();
        padding_mask.resize(self.seq_len, false);
        tokens.resize(self.seq_len, 0);
        // Megatron-LM writes 0 in place of padding, and of labels that look like padding.
        for (token, is_text) in tokens.iter_mut().zip(&padding_mask) {
            *token *= u32::from(*is_text);
        }
        for label in &mut labels {
            if *label == self.pad {
                *label = 0;
            }
        }
        BertSample {
            text: tokens,
            types,
            labels,
            is_random,
            padding_mask,
            loss_mask,
            truncated,
        }
    }

    /// What a masked token becomes.
    fn replacement(&self, token: u32, random: &mut RandomState) -> u32 {
        if random.uniform() < 0.8 {
            return self.mask;
        }
        if random.uniform() < 0.5 {
            return token;
        }
        let ids = self.pieces.ids();
        ids[random.below(ids.len())]
    }
}

/// Removes tokens from either end of the longer segment, of B if both have the same length, until
/// both have `target_len` tokens together. Returns the rest, and whether any were removed.
fn truncate<'a>(
    mut a: &'a [u32],
    mut b: &'a [u32],
    target_len: usize,
    random: &mut RandomState,
) -> (&'a [u32], &'a [u32], bool) {
    let is_too_long = a.len() + b.len() > target_len;
    while a.len() + b.len() > target_len {
        let longer = if a.len() > b.len() { &mut a } else { &mut b };
        // The longer one is not empty, because both have tokens together.
        *longer = match random.uniform() < 0.5 {
            true => &longer[1..],
            false => &longer[..longer.len() - 1],
        };
    }
    (a, b, is_too_long)
}
