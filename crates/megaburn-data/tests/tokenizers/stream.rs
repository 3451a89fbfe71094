//! Tests that streaming gives the same text as decoding all tokens at once.

use std::sync::LazyLock;

use megaburn_data::{HfTokenizer, Tokenizer};
use proptest::prelude::*;
use rstest::rstest;

use crate::{FIXTURES, fixture};

static TOKENIZERS: LazyLock<Vec<HfTokenizer>> =
    LazyLock::new(|| FIXTURES.map(fixture).into_iter().collect());

/// The text so far after each token, and the complete text.
fn stream(tokenizer: &HfTokenizer, tokens: &[u32]) -> Vec<String> {
    let mut stream = tokenizer.stream();
    let mut text = String::new();
    let mut seen = Vec::new();
    for &token in tokens {
        text += &stream.push(token);
        seen.push(text.clone());
    }
    text += &stream.finish();
    assert_eq!(stream.finish(), "");
    seen.push(text);
    seen
}

proptest! {
    #[test]
    fn any_tokens_give_the_text_of_the_whole(
        tokens in prop::collection::vec(prop_oneof![0u32..700, 0u32..260, 100u32..180], 0..40)
    ) {
        for tokenizer in TOKENIZERS.iter() {
            let seen = stream(tokenizer, &tokens);
            prop_assert_eq!(&seen[tokens.len()], &tokenizer.decode(&tokens), "{:?}", tokenizer);
        }
    }

    #[test]
    fn text_never_ends_inside_a_character(
        text in "[a-zA-Z .\n]{0,12}[é€𝄞今\u{301}😀 ▁<>]{0,6}[a-z0-9 ']{0,8}[ß今🏽]{0,3}"
    ) {
        for tokenizer in TOKENIZERS.iter() {
            let tokens = tokenizer.encode(&text).unwrap();
            let whole = tokenizer.decode(&tokens);
            for seen in stream(tokenizer, &tokens) {
                prop_assert!(whole.starts_with(&seen), "{tokenizer:?}: {seen:?} of {whole:?}");
            }
        }
    }
}

#[rstest]
#[case("byte-level", "😀 ok", &["", "", "", "😀"])]
#[case("llama2", "😀 ok", &["", "", "", "", "", "😀"])]
fn a_character_appears_when_nothing_can_change_it(
    #[case] name: &str,
    #[case] text: &str,
    #[case] first: &[&str],
) {
    let tokenizer = fixture(name);
    let tokens = tokenizer.encode(text).unwrap();
    let seen = stream(&tokenizer, &tokens);
    let shown: Vec<&str> = seen
        .iter()
        .map(|text| text.trim())
        .take(first.len())
        .collect();
    assert_eq!(shown, first, "{tokens:?}");
    assert_eq!(seen.last().unwrap(), text);
}

#[test]
fn most_text_appears_at_once() {
    for name in FIXTURES {
        let tokenizer = fixture(name);
        let text = "The old boats lie on the banks of the river, green with moss.".repeat(30);
        let tokens = tokenizer.encode(&text).unwrap();
        let seen = stream(&tokenizer, &tokens);
        for (index, seen) in seen.iter().enumerate().take(tokens.len()) {
            assert_eq!(*seen, tokenizer.decode(&tokens[..=index]), "{name}");
        }
    }
}
