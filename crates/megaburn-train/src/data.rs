//! The data of a run, loaded once per process and shared by its rank threads.

use megaburn_collective::Progress;
use megaburn_data::{Corpus, DataError, Sampler, Split, TokenDataset, Tokenizer, bits_per_byte};

use crate::{config::TrainConfig, error::TrainError};

/// Returns the text of a run whose configuration has no `data.path`.
pub type DefaultText = fn() -> Result<Corpus, DataError>;

/// The training and validation tokens, and the tokenizer that made them.
#[derive(Debug)]
pub struct RunData {
    pub(crate) tokenizer: Box<dyn Tokenizer>,
    pub(crate) train: TokenDataset,
    pub(crate) valid: TokenDataset,
    /// The source of the text, its size and its hash, for people.
    pub(crate) description: String,
    /// Hash of the text and its tokenizer. A resumed run must read the same tokens.
    pub(crate) hash: u64,
}

impl RunData {
    /// Loads the data that `[data]` names.
    ///
    /// # Errors
    /// `data.path` is not set; the text cannot be read or is empty; the tokenizer cannot be used, or
    /// cannot encode the text.
    pub fn load(config: &TrainConfig) -> Result<Self, TrainError> {
        let no_text = || {
            let tried = "data.path is not set".into();
            Err(DataError::NoSources { tried })
        };
        Self::load_with(config, no_text, &Progress::none())
    }

    /// As [`load`](Self::load), with a text where `data.path` is not set, and reporting each encoded
    /// part of the text to `progress`.
    pub(crate) fn load_with(
        config: &TrainConfig,
        default_text: DefaultText,
        progress: &Progress,
    ) -> Result<Self, TrainError> {
        let tokenizer = config.data.tokenizer.open()?;
        progress.add(0);
        let corpus = match &config.data.path {
            Some(path) => Corpus::from_file(path)?,
            None => default_text()?,
        };
        progress.expect(corpus.num_bytes().unwrap_or_default() as u64);
        let encoded = |bytes| progress.add(bytes as u64);
        let tokens = TokenDataset::encoded(&corpus, tokenizer.as_ref(), encoded)?;
        let Split { train, valid } = tokens.split(config.data.validation_fraction)?;
        let note = corpus
            .note()
            .map(|note| format!(" ({note})"))
            .unwrap_or_default();
        let mut description = format!("{corpus}{note}");
        if !tokenizer.is_byte_level() {
            let path = String::from(config.data.tokenizer.clone());
            let num_ids = tokenizer.vocab_size();
            description += &format!(", {} tokens of {path} ({num_ids} ids)", tokens.num_tokens());
        }
        // The hash of the byte tokenizer is 0, so the hash of byte-level runs is the one of their
        // text.
        let hash = corpus.hash() ^ tokenizer.hash();
        Ok(Self {
            tokenizer,
            train,
            valid,
            description,
            hash,
        })
    }

    /// The samplers of training and of evaluation; the latter is `None` if
    /// `data.validation_fraction` is 0.
    ///
    /// # Errors
    /// A split of the data is shorter than a sample.
    pub(crate) fn samplers(
        &self,
        config: &TrainConfig,
    ) -> Result<(Sampler, Option<Sampler>), TrainError> {
        let seq_len = config.data.seq_len;
        let train = Sampler::shuffled(self.train.clone(), seq_len, config.run.seed)?;
        let valid = || Sampler::sequential(self.valid.clone(), seq_len);
        let is_evaluated = config.data.validation_fraction > 0.0;
        Ok((train, is_evaluated.then(valid).transpose()?))
    }

    /// Number of token ids of the tokenizer.
    pub(crate) fn vocab(&self) -> usize {
        self.tokenizer.vocab_size()
    }

    /// Converts a validation loss to bits per byte of text, if the tokens' bytes are known.
    pub(crate) fn bits_per_byte(&self, loss: f64) -> Option<f64> {
        self.valid
            .bytes_per_token()
            .map(|bytes| bits_per_byte(loss, bytes))
    }
}
