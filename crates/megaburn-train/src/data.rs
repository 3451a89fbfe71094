//! The data of a run, loaded once a process and shared by its rank threads.

use megaburn_data::{
    ByteTokenizer, Corpus, Split, TokenDataset, Tokenizer as TokenizerTrait, bits_per_byte,
};

use crate::{TrainConfig, TrainError, config::Tokenizer};

/// The text, its tokens and the tokenizer between them.
#[derive(Debug)]
pub(crate) struct RunData {
    pub(crate) tokenizer: Box<dyn TokenizerTrait>,
    pub(crate) train: TokenDataset,
    pub(crate) valid: TokenDataset,
    /// Where the text is from, its size and hash, for people.
    pub(crate) description: String,
    /// Hash of the text: a resumed run must read the same.
    pub(crate) hash: u64,
}

impl RunData {
    /// Reads what `[data]` names.
    pub(crate) fn load(config: &TrainConfig) -> Result<Self, TrainError> {
        let tokenizer: Box<dyn TokenizerTrait> = match config.data.tokenizer {
            Tokenizer::Byte => Box::new(ByteTokenizer),
        };
        let corpus = match &config.data.path {
            Some(path) => Corpus::from_file(path)?,
            None => Corpus::burn_sources()?,
        };
        let tokens = TokenDataset::new(&corpus, tokenizer.as_ref())?;
        let Split { train, valid } = tokens.split(config.data.validation_fraction)?;
        let note = corpus.note().map(|note| format!(" ({note})")).unwrap_or_default();
        let description = format!("{corpus}{note}");
        Ok(Self { tokenizer, train, valid, description, hash: corpus.hash() })
    }

    /// Number of token ids.
    pub(crate) fn vocab(&self) -> usize {
        self.tokenizer.vocab_size()
    }

    /// What a loss means in bits per byte of text, where that is known.
    pub(crate) fn bits_per_byte(&self, loss: f64) -> Option<f64> {
        self.valid.bytes_per_token().map(|bytes| bits_per_byte(loss, bytes))
    }
}
