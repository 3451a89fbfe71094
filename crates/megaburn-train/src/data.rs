//! The data of a run, loaded once a process and shared by its rank threads.

use megaburn_collective::Progress;
use megaburn_data::{Corpus, Sampler, Split, TokenDataset, Tokenizer, bits_per_byte};

use crate::{TrainConfig, TrainError};

/// The text, its tokens and the tokenizer between them.
#[derive(Debug)]
pub struct RunData {
    pub(crate) tokenizer: Box<dyn Tokenizer>,
    pub(crate) train: TokenDataset,
    pub(crate) valid: TokenDataset,
    /// Where the text is from, its size and hash, for people.
    pub(crate) description: String,
    /// Hash of the text and its tokenizer: a resumed run must read the same tokens.
    pub(crate) hash: u64,
}

impl RunData {
    /// Reads what `[data]` names.
    ///
    /// # Errors
    /// The text cannot be read or holds nothing; the tokenizer cannot be used or not encode it.
    pub fn load(config: &TrainConfig) -> Result<Self, TrainError> {
        Self::load_with(config, &Progress::none())
    }

    /// The same, telling `progress` of each part of the text that is read and encoded.
    pub(crate) fn load_with(config: &TrainConfig, progress: &Progress) -> Result<Self, TrainError> {
        let tokenizer = config.data.tokenizer.open()?;
        progress.add(0);
        let corpus = match &config.data.path {
            Some(path) => Corpus::from_file(path)?,
            None => Corpus::burn_sources()?,
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
        // The byte-level hash is 0, so that such runs keep the hash of their text alone.
        let hash = corpus.hash() ^ tokenizer.hash();
        Ok(Self {
            tokenizer,
            train,
            valid,
            description,
            hash,
        })
    }

    /// What a run draws its samples from, and an evaluation; none where nothing is evaluated.
    ///
    /// # Errors
    /// A part that is shorter than a sample.
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

    /// Number of token ids.
    pub(crate) fn vocab(&self) -> usize {
        self.tokenizer.vocab_size()
    }

    /// What a loss means in bits per byte of text, where that is known.
    pub(crate) fn bits_per_byte(&self, loss: f64) -> Option<f64> {
        self.valid
            .bytes_per_token()
            .map(|bytes| bits_per_byte(loss, bytes))
    }
}
