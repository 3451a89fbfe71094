//! `[data.masking]`: which tokens a model learns to predict from those around them.

use megaburn_data::MaskingConfig;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `[data.masking]`: which tokens of a sample are masked, with `data.dataset = "bert"` or `"t5"`. The
/// defaults are those of Megatron-LM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct DataMaskingConfig {
    /// The fraction of the tokens of a sample that is masked at most (Megatron-LM's `--mask-prob`).
    #[schemars(extend("exclusiveMinimum" = 0, "exclusiveMaximum" = 1))]
    pub probability: f64,
    /// The most words of an n-gram that is masked together. Default: 3, with `data.dataset = "t5"` 10.
    #[schemars(extend("minimum" = 1, "maximum" = 1024))]
    pub max_ngram: usize,
    /// Whether all pieces of a word are masked together.
    pub whole_words: bool,
    /// Whether longer n-grams are drawn more often, instead of shorter ones.
    pub longer_ngrams: bool,
    /// Whether the length of an n-gram is drawn from a geometric distribution, as in SpanBERT.
    /// Default: false, with `data.dataset = "t5"` true.
    pub geometric: bool,
}

impl Default for DataMaskingConfig {
    fn default() -> Self {
        let of_megatron = MaskingConfig::new(0.15);
        Self {
            probability: of_megatron.probability,
            max_ngram: of_megatron.max_ngram,
            whole_words: of_megatron.whole_words,
            longer_ngrams: of_megatron.longer_ngrams,
            geometric: of_megatron.geometric,
        }
    }
}

impl DataMaskingConfig {
    /// The most tokens that are masked of `num_tokens` of text.
    pub(super) fn most_masked(&self, num_tokens: usize) -> usize {
        (num_tokens as f64 * self.probability) as usize
    }

    /// The masking of the data set.
    pub(crate) fn of_data(&self) -> MaskingConfig {
        MaskingConfig::new(self.probability)
            .with_max_ngram(self.max_ngram)
            .with_whole_words(self.whole_words)
            .with_longer_ngrams(self.longer_ngrams)
            .with_geometric(self.geometric)
    }
}
