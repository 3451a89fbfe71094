//! Tests that ids and decoded text equal those of Python's `tokenizers`.

use std::fs;

use megaburn_data::Tokenizer;
use rstest::rstest;
use serde::Deserialize;

use crate::{FIXTURES, fixture, folder};

#[derive(Debug, Deserialize)]
struct Case {
    text: String,
    plain: Vec<u32>,
    plain_decoded: String,
    prompt: Vec<u32>,
    prompt_decoded: String,
}

fn cases(name: &str) -> Vec<Case> {
    let cases = fs::read(folder(name).join("expected.json")).unwrap();
    let cases: Vec<Case> = serde_json::from_slice(&cases).unwrap();
    assert!(cases.len() > 20);
    cases
}

#[rstest]
fn ids_and_text_are_pythons(#[values("byte-level", "llama3", "llama2", "mistral")] name: &str) {
    let tokenizer = fixture(name);
    let mut differ = 0;
    for case in cases(name) {
        assert_eq!(
            tokenizer.encode(&case.text).unwrap(),
            case.plain,
            "{name}: {case:?}"
        );
        assert_eq!(
            tokenizer.encode_prompt(&case.text).unwrap(),
            case.prompt,
            "{name}: {case:?}"
        );
        assert_eq!(
            tokenizer.decode(&case.plain),
            case.plain_decoded,
            "{name}: {case:?}"
        );
        assert_eq!(
            tokenizer.decode(&case.prompt),
            case.prompt_decoded,
            "{name}: {case:?}"
        );
        differ += usize::from(case.plain != case.prompt);
    }
    assert!(differ > 0, "no case of {name} spells out a special token");
}

#[test]
fn a_model_that_finds_special_tokens_in_plain_text_is_pythons_but_for_those() {
    let tokenizer = fixture("unigram");
    let reserved = [Some(tokenizer.eos()), tokenizer.pad()];
    let mut forged = 0;
    for case in cases("unigram") {
        assert_eq!(
            tokenizer.encode_prompt(&case.text).unwrap(),
            case.prompt,
            "{case:?}"
        );
        assert_eq!(
            tokenizer.decode(&case.prompt),
            case.prompt_decoded,
            "{case:?}"
        );
        let plain = tokenizer.encode(&case.text).unwrap();
        if case.plain.iter().any(|&id| reserved.contains(&Some(id))) {
            forged += 1;
            assert!(
                plain.iter().all(|&id| !reserved.contains(&Some(id))),
                "{case:?}: {plain:?}"
            );
            assert!(plain.len() > case.plain.len(), "{case:?}: {plain:?}");
        } else {
            assert_eq!(plain, case.plain, "{case:?}");
        }
    }
    assert!(forged > 0, "Python's own encoding never forges one");
}

#[test]
fn no_document_forges_a_special_token() {
    for name in FIXTURES {
        let tokenizer = fixture(name);
        let reserved = [Some(tokenizer.eos()), tokenizer.bos(), tokenizer.pad()];
        for text in [
            "<|endoftext|>",
            "a</s>b",
            "</s>",
            "<s> <pad>",
            "<|begin_of_text|>",
        ] {
            for id in tokenizer.encode(text).unwrap() {
                assert!(!reserved.contains(&Some(id)), "{name}: {text} gives {id}");
            }
        }
    }
}

#[rstest]
#[case("byte-level", "<|endoftext|>", None, None)]
#[case("llama3", "</s>", Some("<|begin_of_text|>"), None)]
#[case("llama2", "</s>", Some("<s>"), None)]
#[case("mistral", "</s>", Some("<s>"), None)]
#[case("unigram", "</s>", None, Some("<pad>"))]
fn special_tokens_are_those_of_the_files_beside_it(
    #[case] name: &str,
    #[case] eos: &str,
    #[case] bos: Option<&str>,
    #[case] pad: Option<&str>,
) {
    let tokenizer = fixture(name);
    let id = |token: &str| tokenizer.token_to_id(token).unwrap();
    assert_eq!(tokenizer.eos(), id(eos));
    assert_eq!(tokenizer.bos(), bos.map(id));
    assert_eq!(tokenizer.pad(), pad.map(id));
    assert!(tokenizer.vocab_size() > id(eos) as usize);
    assert_eq!(tokenizer.decode(&[id(eos)]), "");
}

#[rstest]
fn many_texts_and_long_ones_are_encoded_as_one_prompt(
    #[values("byte-level", "llama3", "llama2", "mistral", "unigram")] name: &str,
) {
    let tokenizer = fixture(name);
    let cases = cases(name);
    let mut texts: Vec<&str> = cases.iter().map(|case| case.text.as_str()).collect();
    let long = format!(
        "{}\n",
        cases
            .iter()
            .map(|case| case.text.as_str())
            .collect::<String>()
    );
    let long = long.repeat((1 << 18) / long.len());
    texts.push(&long);
    let expected: Vec<_> = texts
        .iter()
        .map(|text| tokenizer.encode_prompt(text).unwrap())
        .collect();
    assert!(tokenizer.encode_prompts(&texts).unwrap() == expected);
}
