use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use serde_json::json;
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, OffsetReferential, OffsetType,
    PostProcessorWrapper, PreTokenizedString, PreTokenizer, PreTokenizerWrapper, TokenizerImpl,
    models::bpe::{BPE, BpeTrainer},
    pre_tokenizers::byte_level::ByteLevel,
};

use super::{HfTokenizer, encoder::Encoder, pieces, special::SpecialIds};
use crate::{corpus::Corpus, error::DataError};

/// The token that starts a text in a vocabulary of [`TokenizerTrainer`]: id 0.
pub const BOS: &str = "<|begin_of_text|>";
/// The token that ends a text and separates documents in such a vocabulary: id 1.
pub const EOS: &str = "<|end_of_text|>";
/// The token that pads short samples in such a vocabulary: id 2.
pub const PAD: &str = "<|pad|>";

const CONFIG: &str = "tokenizer_config.json";

/// Learns a byte-level BPE from a corpus (Sennrich et al. 2016, "Neural Machine Translation of Rare
/// Words with Subword Units"; over bytes as in Radford et al. 2019, "Language Models are
/// Unsupervised Multitask Learners").
///
/// All 256 bytes are tokens, so every text survives encoding and decoding. Equal corpora give equal
/// files.
///
/// ```
/// use megaburn_data::{Corpus, Tokenizer, TokenizerTrainer};
///
/// let corpus = Corpus::from_documents("t", vec!["low lower lowest ".repeat(9)])?;
/// let trained = TokenizerTrainer::new(265).train(&corpus)?;
/// assert_eq!(trained.tokenizer().vocab_size(), 265);
/// assert_eq!(trained.tokenizer().encode(" lower")?.len(), 1);
/// # Ok::<(), megaburn_data::DataError>(())
/// ```
#[derive(Clone, Debug)]
pub struct TokenizerTrainer {
    vocab_size: usize,
    special: Vec<String>,
}

/// A trained tokenizer that is not saved yet.
#[derive(Debug)]
pub struct TrainedTokenizer {
    tokenizer: HfTokenizer,
    json: String,
}

type Bpe = TokenizerImpl<
    BPE,
    NormalizerWrapper,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    DecoderWrapper,
>;

impl TokenizerTrainer {
    /// A vocabulary of `vocab_size` tokens: [`BOS`], [`EOS`], [`PAD`], 256 bytes, and merges.
    pub fn new(vocab_size: usize) -> Self {
        Self {
            vocab_size,
            special: [BOS, EOS, PAD].map(String::from).into(),
        }
    }

    /// Adds further special tokens, whose ids follow those of [`BOS`], [`EOS`] and [`PAD`].
    pub fn with_special_tokens(mut self, tokens: impl IntoIterator<Item = String>) -> Self {
        self.special.extend(tokens);
        self
    }

    /// Learns the merges. If the corpus has fewer repeated pairs than requested, the vocabulary is
    /// smaller.
    ///
    /// # Errors
    /// The vocabulary is too small for the bytes and special tokens, a special token is a word that
    /// could occur in text, or the corpus has no text.
    pub fn train(&self, corpus: &Corpus) -> Result<TrainedTokenizer, DataError> {
        let vocab_size = self.vocab_size;
        let num_special = self.special.len();
        if vocab_size < 256 + num_special {
            return Err(DataError::SmallVocab {
                vocab_size,
                num_special,
            });
        }
        self.check_special()?;
        if corpus.documents().is_empty() {
            return Err(DataError::Empty {
                name: corpus.name().into(),
            });
        }
        let fails = |error: tokenizers::Error| DataError::BadTokenizer {
            path: corpus.name().into(),
            why: error.to_string(),
        };
        let tokens = self
            .special
            .iter()
            .map(|token| AddedToken::from(token, true));
        let mut trainer = BpeTrainer::builder()
            .vocab_size(vocab_size)
            .min_frequency(2)
            .show_progress(false)
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .special_tokens(tokens.collect())
            .build();
        let mut bpe: Bpe = TokenizerImpl::new(BPE::default());
        bpe.with_pre_tokenizer(Some(byte_level()));
        bpe.with_decoder(Some(ByteLevel::default()));
        let texts = corpus
            .documents()
            .iter()
            .flat_map(|document| pieces::short_words(document));
        bpe.train(&mut trainer, texts).map_err(fails)?;
        let mut json = bpe.to_string(true).map_err(fails)?;
        json.push('\n');

        // Parses the JSON, so that the tokenizer equals the one that a reader of the file gets.
        let read = Encoder::from_bytes(&json).map_err(fails)?;
        let special = SpecialIds {
            bos: Some(0),
            eos: 1,
            pad: Some(2),
        };
        let name = PathBuf::from("the newly trained tokenizer");
        let tokenizer = HfTokenizer::new(name, read, special, &[json.as_bytes()])?;
        Ok(TrainedTokenizer { tokenizer, json })
    }

    fn check_special(&self) -> Result<(), DataError> {
        for (index, token) in self.special.iter().enumerate() {
            let mut text = PreTokenizedString::from(token.as_str());
            let whole = byte_level().pre_tokenize(&mut text).is_err()
                || text
                    .get_splits(OffsetReferential::Original, OffsetType::Byte)
                    .len()
                    < 2;
            let why = if token.is_empty() {
                "is empty"
            } else if self.special[..index].contains(token) {
                "already exists"
            } else if whole {
                // Merges work inside words, so a single word could be learned and then be dropped
                // as special.
                "is a single word, which could occur in text"
            } else {
                continue;
            };
            return Err(DataError::BadSpecial {
                token: token.clone(),
                why,
            });
        }
        Ok(())
    }
}

fn byte_level() -> ByteLevel {
    ByteLevel::default().add_prefix_space(false)
}

impl TrainedTokenizer {
    /// The trained tokenizer, ready for use.
    pub fn tokenizer(&self) -> &HfTokenizer {
        &self.tokenizer
    }

    /// The tokenizer alone, which can no longer be saved.
    pub fn into_tokenizer(self) -> HfTokenizer {
        self.tokenizer
    }

    /// Writes `tokenizer.json`, and next to it a `tokenizer_config.json`, in the format of Hugging
    /// Face's libraries, and returns the path of the former. If `path` ends in `.json`, it is that
    /// file, else the folder, which is created. Each file is replaced atomically.
    ///
    /// # Errors
    /// One of the files exists and `force` is not set, or one cannot be written.
    pub fn save(&self, path: impl AsRef<Path>, force: bool) -> Result<PathBuf, DataError> {
        let path = path.as_ref();
        let is_file = path
            .extension()
            .is_some_and(|extension| extension == "json");
        let file = if is_file {
            path.to_path_buf()
        } else {
            path.join("tokenizer.json")
        };
        let config = file.with_file_name(CONFIG);
        if file == config {
            let why = format!("{CONFIG} is the name of the file next to it");
            return Err(DataError::BadTokenizer { path: file, why });
        }
        if let Some(path) = [&file, &config]
            .into_iter()
            .find(|path| path.exists() && !force)
        {
            return Err(DataError::Exists { path: path.clone() });
        }
        let folder = file
            .parent()
            .filter(|folder| !folder.as_os_str().is_empty());
        if let Some(folder) = folder {
            fs::create_dir_all(folder).map_err(|source| DataError::Write {
                path: folder.into(),
                source,
            })?;
        }
        let names = json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
        });
        replace(&config, &format!("{names:#}\n"))?;
        replace(&file, &self.json)?;
        Ok(file)
    }
}

/// Writes a temporary file and renames it to `path`.
fn replace(path: &Path, text: &str) -> Result<(), DataError> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".tmp-{}", std::process::id()));
    let write = || -> io::Result<()> {
        let mut file = File::create(&temporary)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    };
    write().map_err(|source| {
        // An error of the removal is ignored: the error of the write is the one to report.
        let _ = fs::remove_file(&temporary);
        DataError::Write {
            path: path.into(),
            source,
        }
    })
}
