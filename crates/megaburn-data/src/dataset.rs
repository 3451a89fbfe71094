//! A range of tokens, cut into samples.

use std::ops::Range;
use std::sync::Arc;

use crate::{
    corpus::Corpus, error::DataError, generated::GeneratedTokens, indexed::IndexedDataset,
    token_store::TokenStore, tokenizer::Tokenizer,
};

/// A range of tokens, in memory, on disk or generated. A clone shares memory and open files.
///
/// In memory, each token takes 1, 2 or 4 bytes, the fewest that hold the vocabulary. Samples on
/// disk are read, and generated ones computed, when they are asked for.
#[derive(Clone, Debug)]
pub struct TokenDataset {
    name: String,
    store: Arc<TokenStore>,
    /// In memory: the ends of all documents but the last, as positions in the store.
    document_ends: Arc<Vec<u64>>,
    range: Range<u64>,
    vocab_size: usize,
    bytes_per_token: Option<f64>,
    /// The hash of what the tokens were made from, if it is known.
    source_hash: Option<u64>,
}

/// The training and validation parts of a data set.
#[derive(Clone, Debug)]
pub struct Split {
    /// The training part: the first tokens.
    pub train: TokenDataset,
    /// The validation part: the last tokens; empty for a fraction of 0.
    pub valid: TokenDataset,
}

impl TokenDataset {
    /// Encodes a corpus. Documents are joined by the tokenizer's eos. A synthetic corpus consists
    /// of tokens already and keeps its own vocabulary.
    ///
    /// # Errors
    /// The tokenizer cannot encode the text, or a token is outside its vocabulary.
    pub fn new(corpus: &Corpus, tokenizer: &dyn Tokenizer) -> Result<Self, DataError> {
        Self::encoded(corpus, tokenizer, |_| ())
    }

    /// Like [`Self::new`], but calls `progress` with the number of bytes of text of each encoded
    /// batch.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn encoded(
        corpus: &Corpus,
        tokenizer: &dyn Tokenizer,
        progress: impl FnMut(usize),
    ) -> Result<Self, DataError> {
        let vocab_size = corpus.vocab_size(tokenizer);
        let mut set = Self::empty(corpus.name(), vocab_size);
        let mut store = TokenStore::for_vocab(vocab_size);
        let mut document_ends = Vec::new();
        let keep = |tokens: &[u32], is_end: bool| {
            check_vocab(corpus.name(), tokens, store.len(), vocab_size)?;
            store.extend(tokens);
            if is_end {
                document_ends.push(store.len());
            }
            Ok(())
        };
        corpus.visit_tokens(tokenizer, keep, progress)?;
        set.range = 0..store.len();
        set.bytes_per_token = corpus
            .num_bytes()
            .map(|b| b as f64 / store.len().max(1) as f64);
        set.source_hash = Some(corpus.hash());
        set.store = Arc::new(store);
        set.document_ends = Arc::new(document_ends);
        Ok(set)
    }

    /// A data set of the given tokens, which are one document; messages call it `name`.
    ///
    /// # Errors
    /// A token is outside the vocabulary.
    pub fn from_tokens(
        name: impl Into<String>,
        tokens: &[u32],
        vocab_size: usize,
    ) -> Result<Self, DataError> {
        let mut set = Self::empty(name, vocab_size);
        let mut store = TokenStore::for_vocab(vocab_size);
        check_vocab(&set.name, tokens, 0, vocab_size)?;
        store.extend(tokens);
        set.range = 0..store.len();
        set.store = Arc::new(store);
        Ok(set)
    }

    /// The tokens of all documents of a data set on disk, one after the other. `vocab_size` is that
    /// of the tokenizer that encoded it; each token is compared with it when it is read.
    pub fn indexed(set: Arc<IndexedDataset>, vocab_size: usize) -> Self {
        let num_text_bytes = set.num_text_bytes();
        let store = TokenStore::Indexed(set.clone());
        let set = Self {
            name: set.prefix().display().to_string(),
            range: 0..store.len(),
            store: Arc::new(store),
            ..Self::empty("", vocab_size)
        };
        match num_text_bytes {
            Some(num_bytes) => set.with_num_text_bytes(num_bytes),
            None => set,
        }
    }

    /// Tokens at some positions of generated data, all below `vocab_size`.
    pub(crate) fn generated(
        name: impl Into<String>,
        tokens: GeneratedTokens,
        range: Range<u64>,
        vocab_size: usize,
    ) -> Self {
        Self {
            range,
            store: Arc::new(TokenStore::Generated(tokens)),
            ..Self::empty(name, vocab_size)
        }
    }

    fn empty(name: impl Into<String>, vocab_size: usize) -> Self {
        let store = Arc::new(TokenStore::for_vocab(vocab_size));
        Self {
            name: name.into(),
            store,
            document_ends: Arc::default(),
            range: 0..0,
            vocab_size,
            bytes_per_token: None,
            source_hash: None,
        }
    }

    /// Splits off the last `valid_fraction` of the tokens (rounded to the nearest token) for
    /// validation.
    ///
    /// The cut depends only on the number of tokens and the fraction, so it may fall inside a
    /// document. Both parts share the memory.
    ///
    /// # Errors
    /// `valid_fraction` is outside `[0, 1)`.
    pub fn split(&self, valid_fraction: f64) -> Result<Split, DataError> {
        if !(0.0..1.0).contains(&valid_fraction) {
            return Err(DataError::Fraction {
                fraction: valid_fraction,
            });
        }
        let num_valid = (self.num_tokens() as f64 * valid_fraction).round() as u64;
        let cut = self.num_tokens() - num_valid;
        Ok(Split {
            train: self.part("training", 0..cut),
            valid: self.part("validation", cut..self.num_tokens()),
        })
    }

    /// The tokens at some positions, as the part of the data set that messages call `what`.
    ///
    /// # Panics
    /// If the positions are outside the data set.
    pub fn part(&self, what: &str, positions: Range<u64>) -> Self {
        assert!(
            positions.end <= self.num_tokens(),
            "positions {positions:?} must be below {}",
            self.num_tokens()
        );
        Self {
            name: format!("{what} part of {}", self.name),
            range: self.range.start + positions.start..self.range.start + positions.end,
            ..self.clone()
        }
    }

    /// A hash that differs between data sets with other documents. It is [`Corpus::hash`] for a
    /// corpus, and for a text in a [`TextCache`](crate::TextCache) too, so that it does not matter
    /// which of both a run reads; [`IndexedDataset::fingerprint`] for other data sets on disk; 0 for
    /// [`Self::from_tokens`]; [`GeneratedSource::hash`](crate::GeneratedSource::hash) for generated
    /// data.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn fingerprint(&self) -> Result<u64, DataError> {
        if let Some(hash) = self.source_hash {
            return Ok(hash);
        }
        match &*self.store {
            TokenStore::Indexed(set) => set.fingerprint(),
            _ => Ok(0),
        }
    }

    /// Sets the hash of what the tokens were made from.
    pub(crate) fn with_source_hash(self, hash: u64) -> Self {
        let source_hash = Some(hash);
        Self {
            source_hash,
            ..self
        }
    }

    /// Sets the number of bytes of text that the tokens were encoded from.
    pub fn with_num_text_bytes(self, num_bytes: u64) -> Self {
        let bytes_per_token = Some(num_bytes as f64 / self.num_tokens().max(1) as f64);
        Self {
            bytes_per_token,
            ..self
        }
    }

    /// The data set under the name that messages use.
    pub fn with_name(self, name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            ..self
        }
    }

    /// The name of the data set, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The positions of its tokens in the data set of which it is a part.
    pub fn positions(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Number of tokens.
    pub fn num_tokens(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Size of the vocabulary; every token is below it.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Bytes of text per token over the whole corpus (document separators are tokens without
    /// bytes); `None` if the tokens do not come from text, or another program encoded it. See
    /// [`crate::bits_per_byte`].
    pub fn bytes_per_token(&self) -> Option<f64> {
        self.bytes_per_token
    }

    /// Bytes per token in memory or on disk: 1, 2, 4 or 8; 4 for generated tokens.
    pub fn token_width(&self) -> usize {
        self.store.token_width()
    }

    /// Number of samples of `seq_len` targets. Consecutive samples overlap by one token, so every
    /// token except the first is a target once. Up to `seq_len - 1` tokens at the end are in no
    /// sample.
    pub fn num_samples(&self, seq_len: usize) -> u64 {
        match seq_len {
            0 => 0,
            _ => self.num_tokens().saturating_sub(1) / seq_len as u64,
        }
    }

    /// Sample `index` in text order: `seq_len + 1` tokens, starting at token `index * seq_len`. The
    /// first `seq_len` are the inputs, the last `seq_len` the targets.
    ///
    /// # Errors
    /// The files cannot be read, or hold a token outside the vocabulary.
    ///
    /// # Panics
    /// If `index` is not below [`Self::num_samples`].
    pub fn sample(&self, seq_len: usize, index: u64) -> Result<Vec<u32>, DataError> {
        let num_samples = self.num_samples(seq_len);
        assert!(
            index < num_samples,
            "sample {index} must be less than {num_samples}"
        );
        let start = index * seq_len as u64;
        self.tokens_at(start..start + seq_len as u64 + 1)
    }

    /// The tokens at some positions of the data set, which must be inside.
    ///
    /// # Errors
    /// As [`Self::sample`].
    pub(crate) fn tokens_at(&self, positions: Range<u64>) -> Result<Vec<u32>, DataError> {
        let start = self.range.start;
        let range = start + positions.start..start + positions.end;
        self.store.get(range, self.vocab_size)
    }

    /// The data set on disk that has the tokens, and their positions in it; `None` for
    /// others.
    pub(crate) fn on_disk(&self) -> Option<(&IndexedDataset, &Range<u64>)> {
        match &*self.store {
            TokenStore::Indexed(set) => Some((set, &self.range)),
            _ => None,
        }
    }

    /// The positions of the tokens of each document, in order. A document that is only partly in the
    /// data set has the positions of that part.
    ///
    /// # Errors
    /// The index of a data set on disk cannot be read, or is damaged.
    pub(crate) fn documents(&self) -> impl Iterator<Item = Result<Range<u64>, DataError>> + '_ {
        let Range { start, end } = self.range;
        let ends: Box<dyn Iterator<Item = Result<u64, DataError>> + '_> = match &*self.store {
            TokenStore::Indexed(set) => {
                let sizes = set.document_sizes();
                Box::new(sizes.scan(0, |end, size| {
                    Some(size.map(|size| {
                        *end += size.num_tokens;
                        *end
                    }))
                }))
            }
            TokenStore::Generated(tokens) => Box::new(tokens.document_ends_after(start).map(Ok)),
            store => {
                let ends = self.document_ends.iter().copied().chain([store.len()]);
                Box::new(ends.map(Ok))
            }
        };
        let mut begin = 0;
        let all = ends.map(move |end| {
            let document = begin..end?;
            begin = document.end;
            Ok(document)
        });
        let is_left = move |document: &Result<Range<u64>, DataError>| {
            document.as_ref().map_or(true, |range| range.start <= end)
        };
        let is_inside = move |document: &Range<u64>| {
            // Documents without tokens are inside too.
            document.is_empty() && document.start >= start
                || document.start.max(start) < document.end.min(end)
        };
        all.take_while(is_left)
            .filter_map(move |document| match document {
                Ok(range) if is_inside(&range) => {
                    let inside = range.start.max(start)..range.end.min(end);
                    Some(Ok(inside.start - start..inside.end - start))
                }
                Ok(_) => None,
                Err(error) => Some(Err(error)),
            })
    }
}

/// Refuses tokens outside the vocabulary. The first one is at `position`.
fn check_vocab(
    name: &str,
    tokens: &[u32],
    position: u64,
    vocab_size: usize,
) -> Result<(), DataError> {
    let is_outside = |&token: &u32| token as usize >= vocab_size;
    match tokens.iter().position(is_outside) {
        Some(at) => Err(DataError::OutsideVocab {
            name: name.into(),
            token: tokens[at].into(),
            position: position + at as u64,
            vocab_size,
        }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;
    use crate::tokenizer::ByteTokenizer;

    #[rstest]
    #[case(256, 1)]
    #[case(257, 2)]
    #[case(65_536, 2)]
    #[case(65_537, 4)]
    fn tokens_are_kept_in_the_narrowest_width(#[case] vocab_size: usize, #[case] width: usize) {
        let tokens: Vec<u32> = (0..100).chain([vocab_size as u32 - 1]).collect();
        let set = TokenDataset::from_tokens("t", &tokens, vocab_size).unwrap();
        assert_eq!(set.token_width(), width);
        assert_eq!(set.sample(100, 0).unwrap(), tokens);
        let error = TokenDataset::from_tokens("t", &[1, 2, vocab_size as u32], vocab_size);
        let error = error.unwrap_err().to_string();
        let expected = format!(
            "t: token {vocab_size} at position 2 is outside the vocabulary of {vocab_size}; use \
            the tokenizer that produced it (data.tokenizer)"
        );
        assert_eq!(error, expected);
    }

    #[test]
    fn each_stretch_that_is_encoded_is_told() {
        let documents = vec!["a document, ".repeat(100_000), "and another".into()];
        let corpus = Corpus::from_documents("two", documents).unwrap();
        let mut told = Vec::new();
        let set = TokenDataset::encoded(&corpus, &ByteTokenizer, |bytes| told.push(bytes)).unwrap();
        assert_eq!(
            Some(told.iter().sum::<usize>() as u64),
            corpus.num_bytes().map(|b| b as u64)
        );
        assert_eq!(set.num_tokens(), 1_200_011 + 1);
    }

    proptest! {
        #[test]
        fn every_token_but_the_first_is_a_target_once(len in 0usize..300, seq_len in 1usize..40) {
            let tokens: Vec<u32> = (0..len as u32).collect();
            let set = TokenDataset::from_tokens("t", &tokens, 300).unwrap();
            let n = set.num_samples(seq_len);
            let targets: Vec<u32> =
                (0..n).flat_map(|i| set.sample(seq_len, i).unwrap()[1..].to_vec()).collect();
            prop_assert_eq!(&targets[..], tokens.get(1..1 + n as usize * seq_len).unwrap_or_default());
            prop_assert!(len.saturating_sub(1) - n as usize * seq_len < seq_len);
        }

        #[test]
        fn a_split_loses_and_repeats_nothing(len in 0usize..200, fraction in 0.0f64..1.0) {
            let tokens: Vec<u32> = (0..len as u32).collect();
            let split = TokenDataset::from_tokens("t", &tokens, 200).unwrap().split(fraction)?;
            let all = |set: &TokenDataset| set.store.get(set.range.clone(), 200).unwrap();
            prop_assert_eq!([all(&split.train), all(&split.valid)].concat(), tokens);
            prop_assert!((split.valid.num_tokens() as f64 - len as f64 * fraction).abs() <= 0.5);
        }
    }

    #[test]
    fn documents_are_joined_by_eos() {
        let corpus = Corpus::from_documents("two", vec!["ab".into(), "é".into()]).unwrap();
        let set = TokenDataset::new(&corpus, &ByteTokenizer).unwrap();
        assert_eq!(
            set.sample(4, 0).unwrap(),
            [97, 98, ByteTokenizer::EOS, 195, 169]
        );
        assert_eq!(set.bytes_per_token(), Some(0.8));
        assert_eq!(
            (set.vocab_size(), set.token_width(), set.num_tokens()),
            (260, 2, 5)
        );
    }

    #[rstest]
    fn a_fraction_outside_its_range_is_refused(#[values(-0.1, 1.0, f64::NAN)] fraction: f64) {
        let set = TokenDataset::from_tokens("t", &[1, 2, 3], 4).unwrap();
        let error = set.split(fraction).unwrap_err().to_string();
        assert!(error.starts_with(&format!("validation fraction {fraction} is not in [0, 1)")));
    }
}
