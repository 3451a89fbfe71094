//! The training text of a run: documents, or generated symbols.

use std::fmt;

use xxhash_rust::xxh3::Xxh3;

use crate::{
    error::DataError,
    synthetic::{NUM_SYMBOLS, Synthetic, SyntheticKind},
    text_hash::TextHash,
    tokenizer::Tokenizer,
};

/// Number of bytes of text that are encoded at a time.
const BATCH_BYTES: usize = 1 << 24;

/// A text that consists of documents, or a generated sequence of symbols.
///
/// `Display` prints the source, the size and the hash of the text:
///
/// ```
/// let corpus = megaburn_data::Corpus::from_documents("notes", vec!["a".into(), "bc".into()])?;
/// assert_eq!(corpus.to_string(), "notes: 2 documents, 3 bytes, xxh3 d7b8f0fb555b604b");
/// # Ok::<(), megaburn_data::DataError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Corpus {
    name: String,
    note: Option<String>,
    content: Content,
}

#[derive(Clone, Debug)]
enum Content {
    Text(Vec<String>),
    Symbols { law: Synthetic, tokens: Vec<u32> },
}

impl Corpus {
    /// A corpus of the given documents. Empty documents are dropped; messages call the corpus
    /// `name`.
    ///
    /// # Errors
    /// All documents are empty, or there are none.
    pub fn from_documents(
        name: impl Into<String>,
        documents: Vec<String>,
    ) -> Result<Self, DataError> {
        let name = name.into();
        let documents: Vec<String> = documents.into_iter().filter(|d| !d.is_empty()).collect();
        if documents.is_empty() {
            return Err(DataError::Empty { name });
        }
        Ok(Self {
            name,
            note: None,
            content: Content::Text(documents),
        })
    }

    /// The first `num_tokens` symbols of a generated text, whose lowest possible loss is known
    /// ([`Self::loss_floor`]).
    ///
    /// # Errors
    /// The echo distance or `num_tokens` is 0.
    pub fn synthetic(kind: SyntheticKind, seed: u64, num_tokens: usize) -> Result<Self, DataError> {
        let law = Synthetic::new(kind, seed)?;
        let name = match law.kind() {
            SyntheticKind::Markov => format!("synthetic markov (seed {seed})"),
            SyntheticKind::Echo { distance } => {
                format!("synthetic echo (distance {distance}, seed {seed})")
            }
        };
        if num_tokens == 0 {
            return Err(DataError::Empty { name });
        }
        let tokens = law.tokens(num_tokens);
        Ok(Self {
            name,
            note: None,
            content: Content::Symbols { law, tokens },
        })
    }

    /// Sets why this text was taken in place of the preferred one.
    pub fn with_note(self, note: Option<String>) -> Self {
        Self { note, ..self }
    }

    /// The name of the text, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Why this text was taken in place of the preferred one; `None` if it is the preferred one.
    pub fn note(&self) -> Option<&str> {
        self.note.as_deref()
    }

    /// The documents; empty if the corpus is generated symbols.
    pub fn documents(&self) -> &[String] {
        match &self.content {
            Content::Text(documents) => documents,
            Content::Symbols { .. } => &[],
        }
    }

    /// Number of bytes of text; `None` if the corpus is generated symbols.
    pub fn num_bytes(&self) -> Option<usize> {
        match &self.content {
            Content::Text(documents) => Some(documents.iter().map(String::len).sum()),
            Content::Symbols { .. } => None,
        }
    }

    /// The xxh3 hash of all documents, each followed by the byte 0xFF, which never occurs in UTF-8.
    /// For generated symbols, the hash of the symbols as little-endian `u32`.
    pub fn hash(&self) -> u64 {
        match &self.content {
            Content::Text(documents) => {
                let mut hash = TextHash::default();
                for document in documents {
                    hash.add(document.as_bytes());
                    hash.end_document();
                }
                hash.digest()
            }
            Content::Symbols { tokens, .. } => {
                let mut hash = Xxh3::new();
                tokens
                    .iter()
                    .for_each(|token| hash.update(&token.to_le_bytes()));
                hash.digest()
            }
        }
    }

    /// Number of token ids that a model of this corpus needs: the tokenizer's, or [`NUM_SYMBOLS`].
    pub fn vocab_size(&self, tokenizer: &dyn Tokenizer) -> usize {
        match &self.content {
            Content::Text(_) => tokenizer.vocab_size(),
            Content::Symbols { .. } => NUM_SYMBOLS,
        }
    }

    /// The lowest mean loss that a model can reach on samples of `seq_len` ([`Synthetic::floor`]);
    /// `None` for text.
    pub fn loss_floor(&self, seq_len: usize) -> Option<f64> {
        match &self.content {
            Content::Text(_) => None,
            Content::Symbols { law, .. } => Some(law.floor(seq_len)),
        }
    }

    /// Calls `visit` with consecutive chunks of the tokens, in order, with an eos token between two
    /// documents, and with whether another document begins after the chunk. Only the token ids of
    /// one batch of documents are in memory at a time. After each encoded batch, `progress` is
    /// called with its number of bytes of text.
    pub(crate) fn visit_tokens(
        &self,
        tokenizer: &dyn Tokenizer,
        mut visit: impl FnMut(&[u32], bool) -> Result<(), DataError>,
        mut progress: impl FnMut(usize),
    ) -> Result<(), DataError> {
        let documents = match &self.content {
            Content::Text(documents) => documents,
            Content::Symbols { tokens, .. } => return visit(tokens, false),
        };
        let mut is_first = true;
        for batch in batches(documents) {
            let texts: Vec<&str> = batch.iter().map(String::as_str).collect();
            for ids in tokenizer.encode_batch(&texts)? {
                if !std::mem::take(&mut is_first) {
                    visit(&[tokenizer.eos()], true)?;
                }
                visit(&ids, false)?;
            }
            progress(texts.iter().map(|text| text.len()).sum());
        }
        Ok(())
    }
}

/// Splits the documents into batches of at least [`BATCH_BYTES`]; the last document of a batch may
/// exceed that size.
fn batches(documents: &[String]) -> impl Iterator<Item = &[String]> {
    let mut rest = documents;
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let fits = |document: &&String| {
            let room = bytes < BATCH_BYTES;
            bytes += document.len();
            room
        };
        let (batch, left) = rest.split_at(rest.iter().take_while(fits).count());
        rest = left;
        (!batch.is_empty()).then_some(batch)
    })
}

impl fmt::Display for Corpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.name)?;
        if let Some(note) = &self.note {
            write!(f, " ({note})")?;
        }
        match &self.content {
            Content::Text(documents) => {
                let count = documents.len();
                let bytes = self.num_bytes().unwrap_or_default();
                let plural = if count == 1 { "" } else { "s" };
                write!(f, ": {count} document{plural}, {bytes} bytes")?;
            }
            Content::Symbols { tokens, .. } => write!(f, ": {} symbols", tokens.len())?,
        }
        write!(f, ", xxh3 {:016x}", self.hash())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{dataset::TokenDataset, tokenizer::ByteTokenizer};

    fn text(documents: &[&str]) -> Corpus {
        Corpus::from_documents("t", documents.iter().map(|d| d.to_string()).collect()).unwrap()
    }

    #[test]
    fn the_hash_sees_the_text_and_where_documents_end() {
        let base = text(&["ab", "c"]).hash();
        assert_eq!(
            base,
            text(&["ab", "", "c"]).hash(),
            "an empty document is none"
        );
        for other in [
            text(&["a", "bc"]),
            text(&["abc"]),
            text(&["c", "ab"]),
            text(&["ab", "d"]),
        ] {
            assert_ne!(base, other.hash());
        }
    }

    /// Runs compare this hash with the one that they began with.
    #[test]
    fn the_hash_is_that_of_earlier_versions() {
        let found = text(&["ab", "", "é"]).hash();
        assert_eq!(found, xxhash_rust::xxh3::xxh3_64(b"ab\xFF\xC3\xA9\xFF"));
    }

    #[test]
    fn a_corpus_without_text_is_refused() {
        for documents in [vec![], vec![String::new(), String::new()]] {
            let error = Corpus::from_documents("nothing", documents)
                .unwrap_err()
                .to_string();
            assert_eq!(
                error,
                "`nothing` is empty; give a text with at least one sample"
            );
        }
    }

    #[test]
    fn a_synthetic_corpus_keeps_its_own_symbols() {
        let kind = SyntheticKind::Echo { distance: 7 };
        let corpus = Corpus::synthetic(kind, 3, 1000).unwrap();
        let set = TokenDataset::new(&corpus, &ByteTokenizer).unwrap();
        assert_eq!(
            (set.vocab_size(), set.token_width(), set.num_tokens()),
            (64, 1, 1000)
        );
        assert_eq!(
            set.sample(999, 0).unwrap(),
            Synthetic::new(kind, 3).unwrap().tokens(1000)
        );
        assert_eq!(set.bytes_per_token(), None);
        assert_eq!(
            corpus.loss_floor(128),
            Some(Synthetic::new(kind, 3).unwrap().floor(128))
        );
        assert_eq!(text(&["a"]).loss_floor(128), None);
        let shown = corpus.to_string();
        assert!(shown.starts_with("synthetic echo (distance 7, seed 3): 1000 symbols, xxh3 "));
        let error = Corpus::synthetic(kind, 3, 0).unwrap_err().to_string();
        assert!(
            error.starts_with("`synthetic echo (distance 7, seed 3)` is empty"),
            "{error}"
        );
        assert_ne!(
            corpus.hash(),
            Corpus::synthetic(SyntheticKind::Markov, 3, 1000)
                .unwrap()
                .hash()
        );
    }
}
