//! Opens one data set or text.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use megaburn_collective::Progress;
use megaburn_data::{
    Corpus, DataError, DocumentRange, GeneratedPart, GeneratedSource, IndexedDataset,
    ObjectStoreConfig, SequenceRange, TextCache, TokenDataset, Tokenizer,
};
use megaburn_store::is_url;

use super::{cache_dir::cache_dir, encoding_log::EncodingLog, mixture::DataPart, object_store_log};
use crate::{
    config::{DataConfig, MixBy, Packing, require},
    error::TrainError,
};

/// Number of documents whose ends are checked.
const NUM_CHECKED: usize = 16;

/// An opened data set.
pub(super) struct Source {
    /// Its path; for the default text, its name.
    pub(super) path: String,
    pub(super) tokens: TokenDataset,
    /// The data set on disk, if it is one of Megatron-LM's format.
    pub(super) documents: Option<Arc<IndexedDataset>>,
    /// Differs between data sets with other tokens from the same tokenizer.
    pub(super) hash: u64,
    /// What it is, for people.
    pub(super) description: String,
    /// Whether it was encoded in memory from text.
    pub(super) is_text: bool,
    /// The lowest mean loss that a model can reach, in nats per token, if it is known.
    pub(super) loss_floor: Option<f64>,
}

impl Source {
    /// Opens a data set in Megatron-LM's format, or encodes a text. Of generated data it is `part`.
    ///
    /// # Errors
    /// There is neither at the path, or it cannot be read; another tokenizer encoded it.
    pub(super) fn open(
        path: &str,
        part: GeneratedPart,
        config: &DataConfig,
        tokenizer: &dyn Tokenizer,
        progress: &Progress,
    ) -> Result<Self, DataError> {
        if let Some(source) = GeneratedSource::parse(path) {
            return Self::generated(&source?, part, config, tokenizer);
        }
        if is_indexed(Path::new(path)) {
            return Self::indexed(path, config, tokenizer, progress);
        }
        match cache_for(Path::new(path), config)? {
            Some(cache) => Self::cached(path, &cache, tokenizer, progress),
            None => Self::in_memory(&Corpus::from_file(path)?, tokenizer, progress),
        }
    }

    /// All of it, in a mixture by `mix_by`.
    pub(super) fn all(&self, mix_by: MixBy) -> DataPart {
        DataPart {
            path: self.path.clone(),
            hash: self.hash,
            tokens: self.tokens.clone(),
            sequences: self.documents.clone().map(SequenceRange::all),
            documents: self.documents.clone().map(DocumentRange::all),
            mix_by,
        }
    }

    /// Checks that documents end with the eos if the run must see where they end.
    ///
    /// # Errors
    /// None of the first documents does, or they cannot be read.
    pub(super) fn check_ends(&self, config: &DataConfig, eos: u32) -> Result<(), TrainError> {
        let splits = config.documents && config.packing == Packing::None;
        let key = match (splits, config.eod_mask_loss, config.active_fim()) {
            (true, ..) => "data.documents",
            (_, true, _) => "data.eod_mask_loss",
            (.., Some(_)) => "data.fim",
            _ => return Ok(()),
        };
        let Some(set) = self
            .documents
            .as_ref()
            .filter(|set| set.num_documents() > 1)
        else {
            return Ok(());
        };
        if set.ends_with(eos, NUM_CHECKED)? {
            return Ok(());
        }
        let rule = format!(
            "left out for {}, whose documents do not end with the eos {eos}, which shows where they \
            end: encode it with `megaburn data preprocess --append-eod`",
            self.path
        );
        require(false, key, "set", rule)
    }

    fn generated(
        source: &GeneratedSource,
        part: GeneratedPart,
        config: &DataConfig,
        tokenizer: &dyn Tokenizer,
    ) -> Result<Self, DataError> {
        Ok(Self {
            path: source.name().into(),
            hash: source.hash(),
            description: source.to_string(),
            documents: None,
            is_text: false,
            tokens: source.dataset(part, tokenizer)?,
            loss_floor: source.loss_floor(config.seq_len),
        })
    }

    fn indexed(
        path: &str,
        config: &DataConfig,
        tokenizer: &dyn Tokenizer,
        progress: &Progress,
    ) -> Result<Self, DataError> {
        let mut store = ObjectStoreConfig::new();
        if is_url(path) {
            let progress = progress.clone();
            store = store
                .with_cache_dir(cache_dir(Path::new(path), config)?)
                .on_event(move |event| object_store_log::log(event, &progress));
        }
        let set = Arc::new(IndexedDataset::open_with(path, &store)?);
        set.check_tokenizer(tokenizer)?;
        let plural = if set.num_documents() == 1 { "" } else { "s" };
        let hash = set.fingerprint()?;
        Ok(Self {
            path: path.into(),
            hash,
            description: format!(
                "{path}: {} document{plural}, {} tokens, xxh3 {hash:016x}",
                set.num_documents(),
                set.num_tokens()
            ),
            documents: Some(set.clone()),
            is_text: false,
            loss_floor: None,
            tokens: TokenDataset::indexed(set, tokenizer.vocab_size()),
        })
    }

    fn cached(
        path: &str,
        cache: &TextCache,
        tokenizer: &dyn Tokenizer,
        progress: &Progress,
    ) -> Result<Self, DataError> {
        let mut log = EncodingLog::new(path, progress);
        let tokens = cache.open(Path::new(path), tokenizer, |event| log.event(event))?;
        let hash = tokens.fingerprint()?;
        let num_tokens = tokens.num_tokens();
        Ok(Self {
            path: path.into(),
            hash,
            description: format!("{path}: {num_tokens} tokens, xxh3 {hash:016x}"),
            documents: None,
            is_text: false,
            loss_floor: None,
            tokens,
        })
    }

    pub(super) fn in_memory(
        corpus: &Corpus,
        tokenizer: &dyn Tokenizer,
        progress: &Progress,
    ) -> Result<Self, DataError> {
        progress.expect(corpus.num_bytes().unwrap_or_default() as u64);
        let encoded = |bytes| progress.add(bytes as u64);
        let tokens = TokenDataset::encoded(corpus, tokenizer, encoded)?;
        Ok(Self {
            path: corpus.name().into(),
            hash: corpus.hash(),
            description: described(corpus),
            documents: None,
            is_text: true,
            loss_floor: None,
            tokens,
        })
    }
}

/// The text, its size and its hash, and why it was taken.
fn described(corpus: &Corpus) -> String {
    let note = corpus.note().map(|note| format!(" ({note})"));
    format!("{corpus}{}", note.unwrap_or_default())
}

/// Whether a path names a data set in Megatron-LM's format: a URL, one of its files, or both without
/// their endings.
fn is_indexed(path: &Path) -> bool {
    let ending = path.extension().unwrap_or_default();
    let index = || {
        let mut index = path.as_os_str().to_owned();
        index.push(".idx");
        Path::new(&index).exists()
    };
    is_url(path) || ending == "bin" || ending == "idx" || (!path.is_file() && index())
}

/// The cache for a text; `None` if it is encoded in memory.
fn cache_for(path: &Path, config: &DataConfig) -> Result<Option<TextCache>, DataError> {
    let num_bytes = fs::metadata(path).map_or(0, |metadata| metadata.len());
    if config.cache_dir.is_none() && !TextCache::is_needed(path, num_bytes) {
        return Ok(None);
    }
    Ok(Some(TextCache::new(cache_dir(path, config)?)))
}
