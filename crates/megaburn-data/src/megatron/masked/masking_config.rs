use crate::error::DataError;

/// The most candidates of an n-gram.
const MOST_NGRAM: usize = 1024;

/// Which tokens of a sample are masked.
///
/// The candidates are words, or their pieces. In a random order each one is the beginning of an
/// n-gram of candidates, which is masked if none of it is and if the number of masked tokens stays
/// within its bound.
#[derive(Clone, Debug, PartialEq)]
pub struct MaskingConfig {
    /// The fraction of the tokens of a sample that is masked at most. Megatron-LM: 0.15.
    pub probability: f64,
    /// The most candidates of an n-gram. Default: 3, as in Megatron-LM for BERT; 10 for T5.
    pub max_ngram: usize,
    /// Whether a candidate is a word, with all of its pieces that begin with `##`. Default: true.
    pub whole_words: bool,
    /// Whether n-grams of `n` candidates are drawn the more often the larger `n` is, instead of in
    /// inverse proportion to `n`. Default: false.
    pub longer_ngrams: bool,
    /// Whether the number of candidates of an n-gram is drawn from a geometric distribution of mean
    /// 5, as in SpanBERT (arXiv:1907.10529), whatever `longer_ngrams` is. Default: false, as in
    /// Megatron-LM for BERT; true for T5.
    pub geometric: bool,
}

impl MaskingConfig {
    /// Masks up to this fraction of the tokens, in n-grams of up to 3 whole words.
    pub fn new(probability: f64) -> Self {
        Self {
            probability,
            max_ngram: 3,
            whole_words: true,
            longer_ngrams: false,
            geometric: false,
        }
    }

    /// Sets the most candidates of an n-gram.
    pub fn with_max_ngram(self, max_ngram: usize) -> Self {
        Self { max_ngram, ..self }
    }

    /// Sets whether a candidate is a whole word.
    pub fn with_whole_words(self, whole_words: bool) -> Self {
        Self {
            whole_words,
            ..self
        }
    }

    /// Sets whether longer n-grams are drawn more often.
    pub fn with_longer_ngrams(self, longer_ngrams: bool) -> Self {
        Self {
            longer_ngrams,
            ..self
        }
    }

    /// Sets whether the length of an n-gram is drawn from a geometric distribution.
    pub fn with_geometric(self, geometric: bool) -> Self {
        Self { geometric, ..self }
    }

    pub(super) fn check(&self) -> Result<(), DataError> {
        let bad = |why: String| Err(DataError::MaskedSamples { why });
        let probability = self.probability;
        if !(probability > 0.0 && probability < 1.0) {
            return bad(format!(
                "the masking probability is {probability}; give one between 0 and 1, such as 0.15"
            ));
        }
        if !(1..=MOST_NGRAM).contains(&self.max_ngram) {
            return bad(format!(
                "the longest n-gram has {} words; give 1 to {MOST_NGRAM}",
                self.max_ngram
            ));
        }
        Ok(())
    }
}
