//! The tokens that mark the parts of a transformed document.

use crate::{error::DataError, tokenizer::Tokenizer};

/// How published tokenizers spell the tokens before the prefix, the middle and the suffix.
const SPELLINGS: [[&str; 3]; 6] = [
    // StarCoder, Granite.
    ["<fim_prefix>", "<fim_middle>", "<fim_suffix>"],
    // Qwen2.5-Coder, CodeGemma, OpenAI's cl100k_base.
    ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"],
    // SantaCoder.
    ["<fim-prefix>", "<fim-middle>", "<fim-suffix>"],
    // CodeLlama.
    ["▁<PRE>", "▁<MID>", "▁<SUF>"],
    // DeepSeek-Coder: the middle is written after the end, where the hole in the text was.
    ["<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜fim▁hole｜>"],
    // Codestral.
    ["[PREFIX]", "[MIDDLE]", "[SUFFIX]"],
];

/// The ids of the tokens before each part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sentinels {
    pub(super) prefix: u32,
    pub(super) middle: u32,
    pub(super) suffix: u32,
}

impl Sentinels {
    /// The tokens with these spellings of prefix, middle and suffix; if none is given, those of a
    /// published tokenizer.
    ///
    /// # Errors
    /// Only some of the spellings are given; the tokenizer does not have one of the tokens, or none
    /// of the known ones.
    pub(super) fn find(
        tokenizer: &dyn Tokenizer,
        given: [Option<&str>; 3],
    ) -> Result<Self, DataError> {
        let failed = |why| Err(DataError::Fim { why });
        let ids = |spellings: [&str; 3]| spellings.map(|token| tokenizer.token_to_id(token));
        let [prefix, middle, suffix] = match given {
            [None, None, None] => {
                let known = SPELLINGS.into_iter().map(ids);
                let mut known = known.filter_map(|[a, b, c]| Some([a?, b?, c?]));
                match known.next() {
                    Some(ids) => ids,
                    None => return failed(none_found()),
                }
            }
            [Some(prefix), Some(middle), Some(suffix)] => {
                let spellings = [prefix, middle, suffix];
                match ids(spellings) {
                    [Some(prefix), Some(middle), Some(suffix)] => [prefix, middle, suffix],
                    ids => {
                        let missing = spellings.into_iter().zip(ids);
                        let missing = missing.filter(|(_, id)| id.is_none());
                        let missing: Vec<String> =
                            missing.map(|(token, _)| format!("`{token}`")).collect();
                        return failed(format!(
                            "the tokenizer has no token {}; spell prefix, middle and suffix as in \
                            its vocabulary",
                            missing.join(" and no token ")
                        ));
                    }
                }
            }
            _ => {
                return failed(
                    "only some of its tokens are named; name prefix, middle and suffix, or none of \
                    them"
                        .into(),
                );
            }
        };
        Ok(Self {
            prefix,
            middle,
            suffix,
        })
    }
}

fn none_found() -> String {
    let known = SPELLINGS.map(|[prefix, ..]| format!("`{prefix}`"));
    format!(
        "the tokenizer has none of the tokens {}, with those for middle and suffix; name its own as \
        prefix, middle and suffix, or train a tokenizer with `megaburn tokenize --special \
        '<fim_prefix>' --special '<fim_middle>' --special '<fim_suffix>'`",
        known.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::{corpus::Corpus, tokenizer::ByteTokenizer, tokenizer::TokenizerTrainer};

    fn with_special(tokens: &[&str]) -> Box<dyn Tokenizer> {
        let corpus = Corpus::from_documents("t", vec!["a text".into()]).unwrap();
        let tokens = tokens.iter().map(|token| token.to_string());
        let trainer = TokenizerTrainer::new(270).with_special_tokens(tokens);
        Box::new(trainer.train(&corpus).unwrap().into_tokenizer())
    }

    #[rstest]
    fn tokens_of_published_tokenizers_are_found(#[values(0, 1, 2, 3, 4, 5)] at: usize) {
        let [prefix, middle, suffix] = SPELLINGS[at];
        let tokenizer = with_special(&[suffix, prefix, middle]);
        let expected = Sentinels {
            suffix: 3,
            prefix: 4,
            middle: 5,
        };
        let found = Sentinels::find(tokenizer.as_ref(), [None; 3]).unwrap();
        assert_eq!(found, expected);
    }

    #[test]
    fn other_tokens_are_named() {
        let tokenizer = with_special(&["<p>", "<m>", "<s>", "<fim_prefix>"]);
        let find = |given| Sentinels::find(tokenizer.as_ref(), given);
        let found = find([Some("<p>"), Some("<m>"), Some("<s>")]).unwrap();
        assert_eq!([found.prefix, found.middle, found.suffix], [3, 4, 5]);
        for (given, expected) in [
            (
                [Some("<p>"), Some("<n>"), Some("<t>")],
                "no token `<n>` and no token `<t>`; spell prefix, middle and suffix as in",
            ),
            (
                [Some("<p>"), None, Some("<s>")],
                "only some of its tokens are named; name",
            ),
            (
                [None; 3],
                "the tokenizer has none of the tokens `<fim_prefix>`, `<|fim_prefix|>`, ",
            ),
        ] {
            let error = find(given).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        let error = Sentinels::find(&ByteTokenizer, [None; 3]).unwrap_err();
        assert!(error.to_string().contains("`megaburn tokenize --special"));
    }
}
