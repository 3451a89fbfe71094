use std::{
    fmt, fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use tokenizers::{Model, ModelWrapper};
use xxhash_rust::xxh3::Xxh3;

use super::{
    TextStream, Tokenizer, pieces,
    special::SpecialIds,
    stream::{HfStream, decode},
    transformers,
};
use crate::error::DataError;

/// More ids than any real vocabulary has; a file with a higher id is damaged.
const MOST_IDS: usize = 1 << 24;

/// A tokenizer that is read from Hugging Face's `tokenizer.json`.
///
/// The token that ends a text is read from the files in the same folder: `tokenizer_config.json`,
/// `special_tokens_map.json`, `generation_config.json`, `config.json`, in this order. If none of
/// them names it, it is an added token with a usual name, such as `<|endoftext|>` or `</s>`.
pub struct HfTokenizer {
    path: PathBuf,
    /// Encodes special tokens in text as plain text.
    plain: tokenizers::Tokenizer,
    /// Recognises special tokens in text; created at its first use.
    prompt: OnceLock<tokenizers::Tokenizer>,
    /// The special tokens before and after a text; found at their first use.
    template: OnceLock<Option<[Vec<u32>; 2]>>,
    special: SpecialIds,
    vocab_size: usize,
    hash: u64,
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
    /// Opens a `tokenizer.json`, or the one in a folder.
    ///
    /// # Errors
    /// There is no such file, the file is not a tokenizer, or no token that ends a text is found.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, DataError> {
        let path = file(path.as_ref())?;
        let bytes = fs::read(&path).map_err(|source| DataError::Io {
            path: path.clone(),
            source,
        })?;
        let plain = parse(&path, &bytes)?;
        let special = SpecialIds::find(&path, &plain)?;
        Self::new(path, plain, special, &bytes)
    }

    /// The tokenizer whose `tokenizer.json` has the content `bytes`.
    pub(super) fn new(
        path: PathBuf,
        mut plain: tokenizers::Tokenizer,
        special: SpecialIds,
        bytes: &[u8],
    ) -> Result<Self, DataError> {
        plain.set_encode_special_tokens(true);
        let highest = plain.get_vocab(true).into_values().max();
        let vocab_size = highest.map_or(0, |id| id as usize + 1);
        if vocab_size > MOST_IDS {
            let why = format!("its highest id would make a vocabulary of {vocab_size}");
            return Err(DataError::BadTokenizer { path, why });
        }
        let mut hash = Xxh3::new();
        hash.update(bytes);
        // The file does not say which token separates documents, but the token is part of the
        // training data.
        hash.update(&special.eos.to_le_bytes());
        let (prompt, template) = (OnceLock::new(), OnceLock::new());
        let hash = hash.digest();
        Ok(Self {
            path,
            plain,
            prompt,
            template,
            special,
            vocab_size,
            hash,
        })
    }

    /// The `tokenizer.json` that was read.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The id of a token, spelled as in the vocabulary.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.plain.token_to_id(token)
    }

    fn ids(
        &self,
        tokenizer: &tokenizers::Tokenizer,
        text: &str,
        template: bool,
    ) -> Result<Vec<u32>, DataError> {
        match tokenizer.encode_fast(text, template) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(error) => Err(DataError::Encode {
                tokenizer: self.path.display().to_string(),
                excerpt: text.chars().take(40).collect(),
                why: error.to_string(),
            }),
        }
    }

    /// Recognises special tokens in text.
    fn prompt(&self) -> &tokenizers::Tokenizer {
        self.prompt.get_or_init(|| {
            let mut prompt = self.plain.clone();
            prompt.set_encode_special_tokens(false);
            prompt
        })
    }

    /// The special tokens that the template puts before and after a text; `None` if it does more
    /// than that.
    fn template(&self) -> Result<&Option<[Vec<u32>; 2]>, DataError> {
        if self.template.get().is_none() {
            let inner = self.ids(self.prompt(), "x", false)?;
            let whole = self.ids(self.prompt(), "x", true)?;
            let mut starts = 0..=whole.len().saturating_sub(inner.len());
            let at = starts.find(|at| !inner.is_empty() && whole[*at..].starts_with(&inner));
            let around = at.map(|at| [whole[..at].into(), whole[at + inner.len()..].into()]);
            // Another thread may have found the same.
            let _ = self.template.set(around);
        }
        Ok(self.template.get_or_init(|| None))
    }

    /// Whether the token is eos, bos or pad, which training text must not encode to.
    fn is_reserved(&self, id: u32) -> bool {
        let SpecialIds { eos, bos, pad } = self.special;
        id == eos || Some(id) == bos || Some(id) == pad
    }

    /// Encodes the spelling of a special token, character by character. Models that search for the
    /// longest piece (Unigram, WordLevel) find special tokens in text even if added tokens are not
    /// recognised.
    fn spelled_out(&self, id: u32) -> Vec<u32> {
        let token = self.plain.id_to_token(id).unwrap_or_default();
        let model = self.plain.get_model();
        let of = |c: char| {
            model
                .tokenize(c.encode_utf8(&mut [0; 4]))
                .unwrap_or_default()
        };
        let ids = token.chars().flat_map(of).map(|token| token.id);
        ids.filter(|&id| !self.is_reserved(id)).collect()
    }
}

impl Tokenizer for HfTokenizer {
    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        let ids = self.ids(&self.plain, text, false)?;
        if !ids.iter().any(|&id| self.is_reserved(id)) {
            return Ok(ids);
        }
        // The model found a special token in plain text: replace it by its spelling.
        let honest = |id| {
            if self.is_reserved(id) {
                self.spelled_out(id)
            } else {
                vec![id]
            }
        };
        Ok(ids.into_iter().flat_map(honest).collect())
    }

    fn encode_batch(&self, texts: &[&str]) -> Result<Vec<Vec<u32>>, DataError> {
        pieces::encode(texts, |text| self.encode(text))
    }

    fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, DataError> {
        self.ids(self.prompt(), text, true)
    }

    fn check_prompts(&self) -> Result<(), DataError> {
        transformers::check(&self.path, &self.plain, self.template()?)
    }

    fn encode_prompts(&self, texts: &[&str]) -> Result<Vec<Vec<u32>>, DataError> {
        let Some([before, after]) = self.template()? else {
            return texts.iter().map(|text| self.encode_prompt(text)).collect();
        };
        let mut encoded = pieces::encode(texts, |text| self.ids(self.prompt(), text, false))?;
        for ids in &mut encoded {
            ids.splice(..0, before.iter().copied());
            ids.extend(after);
        }
        Ok(encoded)
    }

    fn decode(&self, tokens: &[u32]) -> String {
        decode(&self.plain, tokens)
    }

    fn stream(&self) -> Box<dyn TextStream + '_> {
        Box::new(HfStream::new(&self.plain))
    }

    fn eos(&self) -> u32 {
        self.special.eos
    }

    fn bos(&self) -> Option<u32> {
        self.special.bos
    }

    fn pad(&self) -> Option<u32> {
        self.special.pad
    }

    fn hash(&self) -> u64 {
        self.hash
    }
}

/// The `tokenizer.json` for a path to the file or its folder.
fn file(path: &Path) -> Result<PathBuf, DataError> {
    let none = |why: String| DataError::NoTokenizer {
        path: path.into(),
        why,
    };
    let metadata = fs::metadata(path).map_err(|error| match error.kind() {
        ErrorKind::NotFound => none("no such file or folder".into()),
        _ => none(error.to_string()),
    })?;
    if !metadata.is_dir() {
        return Ok(path.into());
    }
    let file = path.join("tokenizer.json");
    if file.is_file() {
        return Ok(file);
    }
    let other = [
        "tokenizer.model",
        "vocab.json",
        "vocab.txt",
        "tiktoken.model",
    ];
    Err(none(
        match other.into_iter().find(|name| path.join(name).exists()) {
            Some(name) => format!(
                "the folder has no tokenizer.json, only {name}; Python's \
             `AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)` writes one"
            ),
            None => "the folder has no tokenizer.json".into(),
        },
    ))
}

/// Parses a tokenizer and removes truncation, padding and BPE dropout, so that it encodes complete
/// texts and is deterministic.
fn parse(path: &Path, bytes: &[u8]) -> Result<tokenizers::Tokenizer, DataError> {
    let bad = |why: String| DataError::BadTokenizer {
        path: path.into(),
        why,
    };
    let mut tokenizer =
        tokenizers::Tokenizer::from_bytes(bytes).map_err(|error| bad(error.to_string()))?;
    tokenizer
        .with_truncation(None)
        .map_err(|error| bad(error.to_string()))?;
    tokenizer.with_padding(None);
    if let ModelWrapper::BPE(model) = tokenizer.get_model()
        && model.dropout.is_some()
    {
        let mut model = model.clone();
        model.dropout = None;
        tokenizer.with_model(model);
    }
    if tokenizer.get_vocab_size(true) == 0 {
        return Err(bad("it has no tokens".into()));
    }
    Ok(tokenizer)
}
