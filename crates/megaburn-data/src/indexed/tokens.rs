//! Tokens of a data set by their position among the tokens of all documents.

use std::io::Read;
use std::ops::Range;

use xxhash_rust::xxh3::Xxh3;

use super::{IndexedDataset, bytes::read_error, with_ending};
use crate::{error::DataError, part::hex, tokenizer::Tokenizer};

/// Number of places at which the tokens are hashed, and bytes at each.
const NUM_PLACES: u64 = 64;
const PLACE_BYTES: u64 = 1 << 16;

impl IndexedDataset {
    /// The tokens at the positions `range`, of documents one after the other.
    ///
    /// # Errors
    /// The tokens cannot be read, or one is outside a vocabulary of `vocab_size` ids.
    pub(crate) fn tokens_at(
        &self,
        range: Range<u64>,
        vocab_size: usize,
    ) -> Result<Vec<u32>, DataError> {
        let size = self.token_type().size();
        let bytes = self.read_bytes(range.start * size, range.end * size)?;
        let tokens = self.token_type().tokens_of(&bytes);
        let checked = tokens.iter().enumerate().map(|(at, &token)| {
            let inside = u32::try_from(token).ok();
            inside
                .filter(|token| (*token as usize) < vocab_size)
                .ok_or_else(|| DataError::OutsideVocab {
                    name: self.prefix().display().to_string(),
                    token,
                    position: range.start + at as u64,
                    vocab_size,
                })
        });
        checked.collect()
    }

    /// Whether any of the first `num_documents` documents ends with `token`.
    ///
    /// # Errors
    /// The index or the tokens cannot be read.
    pub fn ends_with(&self, token: u32, num_documents: usize) -> Result<bool, DataError> {
        let width = self.token_type().size();
        let mut end = 0;
        for document in self.document_sizes().take(num_documents) {
            let num_tokens = document?.num_tokens;
            end += num_tokens;
            if num_tokens == 0 {
                continue;
            }
            let bytes = self.read_bytes((end - 1) * width, end * width)?;
            if self.token_type().tokens_of(&bytes) == [i64::from(token)] {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Checks that a tokenizer is the one that encoded the data set, if megaburn did.
    ///
    /// # Errors
    /// Another one did.
    pub fn check_tokenizer(&self, tokenizer: &dyn Tokenizer) -> Result<(), DataError> {
        let Some(description) = self.description() else {
            return Ok(());
        };
        // Special tokens in text, and those around it, may have been encoded as in prompts.
        let mine = [tokenizer.hash(), tokenizer.prompt_hash()].map(hex);
        let theirs = description["tokenizer"]["xxh3"].as_str();
        match theirs.filter(|theirs| !mine.iter().any(|mine| mine == theirs)) {
            Some(theirs) => Err(DataError::EncodedByOther {
                prefix: self.prefix().into(),
                theirs: format!("xxh3 {theirs}"),
                mine: format!("xxh3 {}", mine[0]),
            }),
            None => Ok(()),
        }
    }

    /// A hash of the documents. If megaburn wrote the data set and nothing has changed it, the hash
    /// covers all tokens. Otherwise it covers the whole index, and 64 KiB at each of 64 places of
    /// the tokens.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn fingerprint(&self) -> Result<u64, DataError> {
        let mut hash = Xxh3::new();
        hash.update(&self.index_hash()?.to_le_bytes());
        let description = self.description();
        let tokens = description
            .as_ref()
            .and_then(|all| all["bin_xxh3"].as_str());
        if let Some(tokens) = tokens {
            hash.update(tokens.as_bytes());
            return Ok(hash.digest());
        }
        let num_bytes = self.num_tokens() * self.token_type().size();
        for place in 0..NUM_PLACES {
            // The last place ends with the last byte.
            let last = num_bytes.saturating_sub(PLACE_BYTES);
            let begin = (last as u128 * place as u128 / (NUM_PLACES - 1) as u128) as u64;
            let end = num_bytes.min(begin + PLACE_BYTES);
            hash.update(&self.read_bytes(begin, end)?);
        }
        Ok(hash.digest())
    }

    /// Bytes `begin..end` of the tokens.
    fn read_bytes(&self, begin: u64, end: u64) -> Result<Vec<u8>, DataError> {
        let mut bytes = vec![0; (end - begin) as usize];
        let read = self.token_bytes(begin, end).read_exact(&mut bytes);
        let path = || with_ending(self.prefix(), ".bin");
        read.map_err(|source| read_error(path(), source))?;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rstest::rstest;
    use tempfile::TempDir;

    use super::*;
    use std::path::Path;

    use crate::{
        preprocess::PreprocessConfig,
        tokenizer::{ByteTokenizer, HfTokenizer},
    };

    /// A data set of documents, each of which ends with eos.
    fn written(dir: &TempDir, name: &str, documents: &[&str]) -> IndexedDataset {
        let input = dir.path().join(format!("{name}.jsonl"));
        let line = |text: &&str| format!("{{\"text\": {text:?}}}\n");
        fs::write(&input, documents.iter().map(line).collect::<String>()).unwrap();
        let out = dir.path().join(name);
        let config = PreprocessConfig::new(vec![input], out.clone()).with_append_eod(true);
        config.run(&ByteTokenizer, |_| ()).unwrap();
        IndexedDataset::open(out).unwrap()
    }

    #[test]
    fn positions_run_through_all_documents() {
        let dir = tempfile::tempdir().unwrap();
        let set = written(&dir, "a", &["ab", "", "c"]);
        let tokens: [u32; 5] = [97, 98, 257, 99, 257];
        for begin in 0..tokens.len() {
            for end in begin..=tokens.len() {
                let found = set.tokens_at(begin as u64..end as u64, 260).unwrap();
                assert_eq!(found, tokens[begin..end], "{begin}..{end}");
            }
        }
    }

    #[test]
    fn the_ends_of_documents_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let set = written(&dir, "a", &["ab", "", "c"]);
        assert!(set.ends_with(257, 1).unwrap());
        assert!(!set.ends_with(98, 16).unwrap());
        let input = dir.path().join("b.jsonl");
        fs::write(
            &input,
            "{\"text\": \"\"}\n{\"text\": \"ab\"}\n{\"text\": \"c\"}\n",
        )
        .unwrap();
        let out = dir.path().join("b");
        let config = PreprocessConfig::new(vec![input], out.clone());
        config.run(&ByteTokenizer, |_| ()).unwrap();
        let set = IndexedDataset::open(out).unwrap();
        assert!(!set.ends_with(257, 16).unwrap());
        assert!(set.ends_with(98, 2).unwrap() && !set.ends_with(98, 1).unwrap());
        assert!(set.ends_with(99, 3).unwrap() && !set.ends_with(99, 2).unwrap());
    }

    #[test]
    fn a_token_outside_the_vocabulary_is_named_with_its_position() {
        let dir = tempfile::tempdir().unwrap();
        let set = written(&dir, "a", &["abc"]);
        assert_eq!(set.tokens_at(0..2, 99).unwrap(), [97, 98]);
        let error = set.tokens_at(1..4, 99).unwrap_err().to_string();
        let expected = "a: token 99 at position 2 is outside the vocabulary of 99; use the";
        assert!(error.contains(expected), "{error}");
    }

    #[test]
    fn a_data_set_accepts_the_tokenizer_that_encoded_it_and_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let input = dir.path().join("a.jsonl");
        fs::write(&input, "{\"text\": \"some text\"}\n").unwrap();
        let fixtures =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tokenizers");
        let mut num_encoded = [0, 0];
        for folder in fs::read_dir(fixtures).unwrap() {
            let Ok(tokenizer) = HfTokenizer::open(folder.unwrap().path()) else {
                continue;
            };
            for (plain, count) in num_encoded.iter_mut().enumerate() {
                let out = dir.path().join("set");
                let config = PreprocessConfig::new(vec![input.clone()], out.clone());
                let config = config.with_plain_text(plain == 1).with_force(true);
                if config.run(&tokenizer, |_| ()).is_err() {
                    continue;
                }
                let set = IndexedDataset::open(out).unwrap();
                set.check_tokenizer(&tokenizer).unwrap();
                let error = set.check_tokenizer(&ByteTokenizer).unwrap_err().to_string();
                assert!(
                    error.contains("was encoded by another tokenizer"),
                    "{error}"
                );
                *count += 1;
            }
        }
        assert!(
            num_encoded.iter().all(|count| *count > 3),
            "{num_encoded:?}"
        );
    }

    #[rstest]
    #[case(1)]
    #[case(300_000)]
    fn the_fingerprint_sees_texts_and_where_documents_end(#[case] size: usize) {
        let dir = tempfile::tempdir().unwrap();
        let text = "a".repeat(size);
        let print =
            |name: &str, documents: &[&str]| written(&dir, name, documents).fingerprint().unwrap();
        let first = print("a", &[&text, "b"]);
        assert_eq!(first, print("same", &[&text, "b"]));
        assert_ne!(first, print("other", &[&text, "c"]));
        assert_ne!(first, print("moved", &[&text[1..], "ab"]));
    }
}
