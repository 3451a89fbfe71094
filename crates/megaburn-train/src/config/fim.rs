//! `[data.fim]`: fill-in-the-middle.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::require::require;
use crate::error::TrainError;

/// `[data.fim]`: training documents whose middle is put last (fill-in-the-middle; Megatron-LM's
/// `--fim-data`). Evaluations read documents as they are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct FimConfig {
    /// The probability that a document is transformed, from 0 to 1.
    #[schemars(extend("minimum" = 0, "maximum" = 1))]
    pub rate: f64,
    /// The probability that a transformed document has the suffix first (SPM), from 0 to 1.
    #[schemars(extend("minimum" = 0, "maximum" = 1))]
    pub spm_rate: f64,
    /// The token between the fragments of a document, such as the files of a repository. Each
    /// fragment is transformed by itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split_sample: Option<String>,
    /// The probability that a fragment of a transformed document is transformed. Used with
    /// `split_sample`. Default: `rate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0, "maximum" = 1))]
    pub fragment_rate: Option<f64>,
    /// Documents and fragments whose text starts with this are not transformed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_prefix: Option<String>,
    /// The token before the prefix. Default: that of a published tokenizer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix: Option<String>,
    /// The token before the middle. Default: that of a published tokenizer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub middle: Option<String>,
    /// The token before the suffix. Default: that of a published tokenizer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub suffix: Option<String>,
}

impl Default for FimConfig {
    /// Half of the documents, half of these with the suffix first.
    fn default() -> Self {
        Self {
            rate: 0.5,
            spm_rate: 0.5,
            split_sample: None,
            fragment_rate: None,
            no_prefix: None,
            prefix: None,
            middle: None,
            suffix: None,
        }
    }
}

impl FimConfig {
    pub(super) fn validate(&self) -> Result<(), TrainError> {
        let rule = "from 0 to 1";
        let is_rate = |rate: f64| (0.0..=1.0).contains(&rate);
        require(is_rate(self.rate), "data.fim.rate", self.rate, rule)?;
        require(
            is_rate(self.spm_rate),
            "data.fim.spm_rate",
            self.spm_rate,
            rule,
        )?;
        let rate = self.fragment_rate.unwrap_or_default();
        require(is_rate(rate), "data.fim.fragment_rate", rate, rule)?;
        let has_fragments = self.fragment_rate.is_none() || self.split_sample.is_some();
        let rule = "left out without data.fim.split_sample, the token between fragments";
        require(has_fragments, "data.fim.fragment_rate", rate, rule)?;
        let has_text = self.no_prefix.as_deref() != Some("");
        let rule =
            "some text: all documents start with the empty one, so none would be transformed";
        require(has_text, "data.fim.no_prefix", "empty", rule)?;
        let given = [
            ("data.fim.prefix", &self.prefix),
            ("data.fim.middle", &self.middle),
            ("data.fim.suffix", &self.suffix),
        ];
        let is_any = given.iter().any(|(_, token)| token.is_some());
        let missing = given.into_iter().find(|(_, token)| token.is_none());
        match missing.filter(|_| is_any) {
            Some((key, _)) => {
                let rule = "given together with the other two of prefix, middle and suffix";
                require(false, key, "missing", rule)
            }
            None => Ok(()),
        }
    }

    /// The transformation of documents.
    pub(crate) fn of_data(&self) -> megaburn_data::FimConfig {
        let mut fim = megaburn_data::FimConfig::new(self.rate).with_spm_rate(self.spm_rate);
        if let Some(token) = &self.split_sample {
            fim = fim.with_split_sample(token);
        }
        if let Some(rate) = self.fragment_rate {
            fim = fim.with_fragment_rate(rate);
        }
        if let Some(start) = &self.no_prefix {
            fim = fim.with_no_prefix(start);
        }
        if let (Some(prefix), Some(middle), Some(suffix)) =
            (&self.prefix, &self.middle, &self.suffix)
        {
            fim = fim.with_tokens(prefix, middle, suffix);
        }
        fim
    }
}
