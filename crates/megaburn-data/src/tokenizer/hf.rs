use std::{
    fmt, fs,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use tokenizers::Model;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::{
    beside,
    encoder::Encoder,
    files::{self, FileKind, is_of_t5},
    pieces,
    special::SpecialIds,
    text_encoder::TextEncoder,
    transformers::{self, Prompts},
};
use crate::error::DataError;

/// More ids than any real vocabulary has; a file with a higher id is damaged.
const MOST_IDS: usize = 1 << 24;

/// A tokenizer that is read from the files of a published model: Hugging Face's `tokenizer.json`,
/// a model of SentencePiece, a file of ranks of tiktoken, or BERT's `vocab.txt`.
///
/// The token that ends a text is read from the files in the same folder: `tokenizer_config.json`,
/// `special_tokens_map.json`, `generation_config.json`, `config.json`, in this order. If none of
/// them names it, it is the one that the file itself names, or an added token with a usual name,
/// such as `<|endoftext|>` or `</s>`.
pub struct HfTokenizer {
    pub(super) path: PathBuf,
    pub(super) kind: FileKind,
    /// The encoding of tiktoken.
    pub(super) encoding: Option<&'static str>,
    /// Encodes special tokens in text as plain text.
    pub(super) plain: TextEncoder,
    /// Recognises special tokens in text; created at its first use.
    prompt: OnceLock<TextEncoder>,
    /// The special tokens before and after a text; found at their first use.
    template: OnceLock<Option<[Vec<u32>; 2]>>,
    pub(super) special: SpecialIds,
    pub(super) vocab_size: usize,
    pub(super) hash: u64,
    pub(super) prompt_hash: u64,
    /// Why it is not known what `transformers` encodes prompts with.
    pub(super) unknown: Option<String>,
}

impl fmt::Debug for HfTokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HfTokenizer")
            .field("path", &self.path)
            .field("vocab_size", &self.vocab_size)
            .field("special", &self.special)
            .finish_non_exhaustive()
    }
}

impl HfTokenizer {
    /// Opens the file of a tokenizer, or the one in a folder: `tokenizer.json` if there is one,
    /// else `tokenizer.model`, `spiece.model`, `tiktoken.model`, a `*.tiktoken` or `vocab.txt`.
    ///
    /// # Errors
    /// There is no such file, the file is not a tokenizer, or no token that ends a text is found.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, DataError> {
        let path = files::find(path.as_ref())?;
        let bytes = fs::read(&path).map_err(|source| DataError::Io {
            path: path.clone(),
            source,
        })?;
        let opened = files::read(&path, &bytes)?;
        let mut plain = opened.encoder;
        let special = SpecialIds::find(&path, &plain, opened.own)?;
        if !matches!(opened.kind, FileKind::Json | FileKind::WordPiece) {
            beside::set_template(&path, &mut plain, &special, opened.kind == FileKind::T5)?;
        }
        let settings = match opened.kind {
            FileKind::Json => String::new(),
            FileKind::WordPiece => opened.settings + &beside::describe(&plain, is_of_t5),
            _ => opened.settings + &beside::describe(&plain, |_| false),
        };
        let hashed = [bytes.as_slice(), settings.as_bytes()];
        let prompts = match opened.kind {
            FileKind::Json => transformers::prompts(&path, &bytes, &plain)?,
            _ => Prompts::AsItIs,
        };
        let mut tokenizer = Self::new(path, plain, special, &hashed)?;
        tokenizer.kind = opened.kind;
        tokenizer.encoding = opened.encoding;
        match prompts {
            Prompts::AsItIs => {}
            Prompts::Changed(prompt, description) => {
                tokenizer.prompt = OnceLock::from(TextEncoder::new(*prompt));
                tokenizer.prompt_hash ^= xxh3_64(description.as_bytes());
            }
            Prompts::Unknown(why) => tokenizer.unknown = Some(why),
        }
        Ok(tokenizer)
    }

    /// The file that [`open`](Self::open) reads in `folder`; `None` if there is none.
    pub fn find(folder: &Path) -> Option<PathBuf> {
        files::find(folder).ok().filter(|_| folder.is_dir())
    }

    /// The tokenizer of a `tokenizer.json`. Its hash is that of the parts of `hashed`.
    pub(super) fn new(
        path: PathBuf,
        mut plain: Encoder,
        special: SpecialIds,
        hashed: &[&[u8]],
    ) -> Result<Self, DataError> {
        plain.set_encode_special_tokens(true);
        let highest = plain.get_vocab(true).into_values().max();
        let vocab_size = highest.map_or(0, |id| id as usize + 1);
        if vocab_size > MOST_IDS {
            let why = format!("its highest id would make a vocabulary of {vocab_size}");
            return Err(DataError::BadTokenizer { path, why });
        }
        let mut hash = Xxh3::new();
        hashed.iter().for_each(|part| hash.update(part));
        // The file does not say which token separates documents, but the token is part of the
        // training data.
        hash.update(&special.eos.to_le_bytes());
        let (prompt, template) = (OnceLock::new(), OnceLock::new());
        let hash = hash.digest();
        Ok(Self {
            path,
            kind: FileKind::Json,
            encoding: None,
            plain: TextEncoder::new(plain),
            prompt,
            template,
            special,
            vocab_size,
            hash,
            prompt_hash: hash,
            unknown: None,
        })
    }

    /// The file that was read.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What an encoder found for a text.
    pub(super) fn ids<T>(&self, text: &str, ids: tokenizers::Result<T>) -> Result<T, DataError> {
        ids.map_err(|error| DataError::Encode {
            tokenizer: self.path.display().to_string(),
            excerpt: text.chars().take(40).collect(),
            why: error.to_string(),
        })
    }

    /// Recognises special tokens in text.
    pub(super) fn prompt(&self) -> &TextEncoder {
        self.prompt.get_or_init(|| {
            let mut prompt = self.plain.encoder.clone();
            prompt.set_encode_special_tokens(false);
            TextEncoder::new(prompt)
        })
    }

    /// Encodes special tokens in text as plain text.
    pub(super) fn plain(&self) -> &TextEncoder {
        &self.plain
    }

    /// The special tokens that the template puts before and after a text; `None` if it does more
    /// than that.
    pub(super) fn template(&self) -> Result<&Option<[Vec<u32>; 2]>, DataError> {
        if self.template.get().is_none() {
            let inner = self.ids("x", self.prompt().encode("x"))?;
            let whole = self.ids("x", self.prompt().encode_with_template("x"))?;
            let mut starts = 0..=whole.len().saturating_sub(inner.len());
            let at = starts.find(|at| !inner.is_empty() && whole[*at..].starts_with(&inner));
            let around = at.map(|at| [whole[..at].into(), whole[at + inner.len()..].into()]);
            // Another thread may have found the same.
            let _ = self.template.set(around);
        }
        Ok(self.template.get_or_init(|| None))
    }

    /// Encodes texts in parallel. Long ones are divided, but not for SentencePiece's models, which
    /// decide about all words of a text together.
    pub(super) fn encode_parts<F>(
        &self,
        texts: &[&str],
        encode: F,
    ) -> Result<Vec<Vec<u32>>, DataError>
    where
        F: Fn(&str) -> Result<Vec<u32>, DataError> + Sync,
    {
        match self.kind {
            FileKind::SentencePiece | FileKind::T5 => pieces::encode_whole(texts, encode),
            _ => pieces::encode(texts, encode),
        }
    }

    /// Whether the token is eos, bos or pad, which training text must not encode to.
    pub(super) fn is_reserved(&self, id: u32) -> bool {
        let SpecialIds { eos, bos, pad } = self.special;
        id == eos || Some(id) == bos || Some(id) == pad
    }

    /// Replaces special tokens that the model found in plain text by their spellings.
    pub(super) fn without_reserved(&self, ids: Vec<u32>) -> Vec<u32> {
        if !ids.iter().any(|&id| self.is_reserved(id)) {
            return ids;
        }
        let honest = |id| {
            if self.is_reserved(id) {
                self.spelled_out(id)
            } else {
                vec![id]
            }
        };
        ids.into_iter().flat_map(honest).collect()
    }

    /// Encodes the spelling of a special token, character by character. Models that search for the
    /// longest piece (Unigram, WordLevel) find special tokens in text even if added tokens are not
    /// recognised.
    fn spelled_out(&self, id: u32) -> Vec<u32> {
        let token = self.plain.encoder.id_to_token(id).unwrap_or_default();
        let model = self.plain.encoder.get_model();
        let of = |c: char| {
            model
                .tokenize(c.encode_utf8(&mut [0; 4]))
                .unwrap_or_default()
        };
        let ids = token.chars().flat_map(of).map(|token| token.id);
        ids.filter(|&id| !self.is_reserved(id)).collect()
    }
}
