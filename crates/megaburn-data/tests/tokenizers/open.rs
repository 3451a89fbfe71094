//! Tests that opening something that is not a tokenizer gives an error that says why.

use std::{fs, path::Path};

use megaburn_data::{HfTokenizer, Tokenizer};
use rstest::rstest;
use tempfile::TempDir;

use crate::folder;

/// A folder with a changed copy of a fixture's `tokenizer.json`, and no other file.
fn copy(name: &str, change: impl Fn(String) -> String) -> TempDir {
    let dir = TempDir::new().unwrap();
    let text = fs::read_to_string(folder(name).join("tokenizer.json")).unwrap();
    fs::write(dir.path().join("tokenizer.json"), change(text)).unwrap();
    dir
}

fn refusal(path: &Path) -> String {
    let error = HfTokenizer::open(path).unwrap_err().to_string();
    assert!(error.contains(&path.display().to_string()), "{error}");
    error
}

#[test]
fn a_file_and_the_folder_that_holds_it_are_the_same_tokenizer() {
    let folder = folder("llama2");
    let a = HfTokenizer::open(&folder).unwrap();
    let b = folder.join("tokenizer.json");
    let b = HfTokenizer::open(b).unwrap();
    assert_eq!((a.path(), a.eos(), a.hash()), (b.path(), b.eos(), b.hash()));
    assert_eq!(a.vocab_size(), b.vocab_size());
}

#[test]
fn what_is_not_there_is_named() {
    let dir = TempDir::new().unwrap();
    let error = refusal(&dir.path().join("nowhere"));
    assert!(
        error.contains("no such file or folder; give a tokenizer.json, tokenizer.model"),
        "{error}"
    );
    let error = refusal(dir.path());
    assert!(
        error.contains("the folder has none of tokenizer.json, tokenizer.model"),
        "{error}"
    );
    fs::write(dir.path().join("vocab.json"), "x").unwrap();
    let error = refusal(dir.path());
    assert!(
        error.contains("the folder has only vocab.json; Python's"),
        "{error}"
    );
}

#[rstest]
#[case::empty("", "EOF while parsing")]
#[case::text("hello", "expected value at line 1 column 1")]
#[case::other_json("{\"model_type\": \"llama\"}", "cannot be used as a tokenizer")]
#[case::a_list("[1, 2]", "cannot be used as a tokenizer")]
#[case::no_tokens(
    "{\"model\": {\"type\": \"BPE\", \"vocab\": {}, \"merges\": []}}",
    "it has no tokens"
)]
#[case::merge_without_token(
    "{\"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 0}, \"merges\": [[\"a\", \"b\"]]}}",
    "cannot be used as a tokenizer"
)]
#[case::giant_id(
    "{\"model\": {\"type\": \"BPE\", \"vocab\": {\"</s>\": 4294967295}, \"merges\": []},
      \"added_tokens\": [{\"id\": 4294967295, \"content\": \"</s>\", \"special\": true,
      \"single_word\": false, \"lstrip\": false, \"rstrip\": false, \"normalized\": false}]}",
    "its highest id would make a vocabulary of 4294967296"
)]
fn a_file_that_is_no_tokenizer_is_named(#[case] text: &str, #[case] why: &str) {
    let dir = copy("llama2", |_| text.into());
    let error = refusal(dir.path());
    assert!(error.contains(why), "{error}");
}

#[test]
fn a_truncated_file_is_refused_at_every_length() {
    let whole = fs::read(folder("byte-level").join("tokenizer.json")).unwrap();
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("tokenizer.json");
    for length in (0..whole.len()).step_by(251) {
        fs::write(&path, &whole[..length]).unwrap();
        assert!(
            refusal(&path).contains("cannot be used as a tokenizer"),
            "{length}"
        );
    }
}

#[test]
fn without_files_beside_it_the_end_is_a_token_of_a_usual_name() {
    let dir = copy("llama3", |text| text);
    let tokenizer = HfTokenizer::open(dir.path()).unwrap();
    assert_eq!(
        Some(tokenizer.eos()),
        tokenizer.token_to_id("<|endoftext|>")
    );
    assert_eq!((tokenizer.bos(), tokenizer.pad()), (None, None));
}

#[rstest]
#[case("tokenizer_config.json", "{\"eos_token\": \"<|begin_of_text|>\"}")]
#[case(
    "tokenizer_config.json",
    "{\"eos_token\": {\"content\": \"<|begin_of_text|>\"}}"
)]
#[case("special_tokens_map.json", "{\"eos_token\": \"<|begin_of_text|>\"}")]
#[case("generation_config.json", "{\"eos_token_id\": 400}")]
#[case("generation_config.json", "{\"eos_token_id\": [400, 1]}")]
#[case("config.json", "{\"eos_token_id\": 400}")]
fn a_file_beside_it_names_the_end(#[case] file: &str, #[case] text: &str) {
    let dir = copy("llama3", |text| text);
    let other = HfTokenizer::open(dir.path()).unwrap();
    fs::write(dir.path().join(file), text).unwrap();
    let tokenizer = HfTokenizer::open(dir.path()).unwrap();
    assert_eq!(tokenizer.token_to_id("<|begin_of_text|>"), Some(400));
    assert_eq!(tokenizer.eos(), 400);
    assert_ne!(
        tokenizer.hash(),
        other.hash(),
        "documents are joined by another token"
    );
}

#[rstest]
#[case(
    "tokenizer_config.json",
    "{\"eos_token\": \"<none>\"}",
    "names \"<none>\", which is not a"
)]
#[case(
    "config.json",
    "{\"eos_token_id\": 4000000000}",
    "gives 4000000000, which is not a token"
)]
#[case("config.json", "{\"eos_token_id\": -1}", "config.json names no token")]
#[case(
    "special_tokens_map.json",
    "[]",
    "special_tokens_map.json names no token"
)]
fn a_tokenizer_without_an_end_is_refused(
    #[case] file: &str,
    #[case] text: &str,
    #[case] says: &str,
) {
    let dir = copy("byte-level", |text| {
        text.replace("<|endoftext|>", "<|other|>")
    });
    fs::write(dir.path().join(file), text).unwrap();
    let error = refusal(dir.path());
    assert!(
        error.contains("does not say which token ends a text"),
        "{error}"
    );
    assert!(
        error.contains(says) && error.contains("does not exist"),
        "{error}"
    );
    assert!(
        error.contains("name it in a tokenizer_config.json next to it"),
        "{error}"
    );
}

#[test]
fn a_file_beside_it_that_is_not_json_is_named() {
    let dir = copy("byte-level", |text| text);
    let path = dir.path().join("tokenizer_config.json");
    fs::write(&path, "{").unwrap();
    let error = HfTokenizer::open(dir.path()).unwrap_err().to_string();
    assert!(
        error.contains(&path.display().to_string()) && error.contains("not valid JSON"),
        "{error}"
    );
}

#[test]
fn a_text_that_has_no_ids_is_an_error_and_ids_without_text_are_nothing() {
    let words = r#"{"model": {"type": "WordLevel", "unk_token": "<unk>",
        "vocab": {"a": 0, "b": 1, "</s>": 2}}, "pre_tokenizer": {"type": "WhitespaceSplit"},
        "added_tokens": [{"id": 2, "content": "</s>", "special": true, "single_word": false,
        "lstrip": false, "rstrip": false, "normalized": false}]}"#;
    let dir = copy("llama2", |_| words.into());
    let tokenizer = HfTokenizer::open(dir.path()).unwrap();
    assert_eq!(tokenizer.encode("b a").unwrap(), [1, 0]);
    assert_eq!(tokenizer.encode_prompt("b </s>").unwrap(), [1, 2]);
    let error = tokenizer.encode("b c").unwrap_err().to_string();
    assert!(error.contains("cannot encode the text \"b c\""), "{error}");
    assert!(tokenizer.encode_batch(&["a", "c"]).is_err());
    assert_eq!(tokenizer.decode(&[1, 3, 99, u32::MAX, 0]), "b a");
}

#[test]
fn what_makes_encoding_random_or_short_is_left_out() {
    let dir = copy("llama3", |text| {
        text.replace("\"dropout\":null", "\"dropout\":0.5")
    });
    let tokenizer = HfTokenizer::open(dir.path()).unwrap();
    let text = "The old boats lie on the banks of the river.";
    let ids = tokenizer.encode(text).unwrap();
    assert!(ids.len() > 4, "the file truncates at 4");
    assert!((0..20).all(|_| tokenizer.encode(text).unwrap() == ids));
}

/// Why `transformers` would encode otherwise, with the files of a fixture and these next to them.
fn difference(name: &str, files: &[(&str, &str)]) -> Option<String> {
    let dir = copy(name, |text| text);
    for (file, content) in files {
        fs::write(dir.path().join(file), content).unwrap();
    }
    let tokenizer = HfTokenizer::open(dir.path()).unwrap();
    let checked = tokenizer.check_prompts();
    checked.err().map(|error| error.to_string())
}

#[rstest]
#[case(
    "byte-level",
    r#"{"additional_special_tokens": ["<|extra|>"]}"#,
    "\"<|extra|>\" is no added token"
)]
#[case(
    "byte-level",
    r#"{"extra_special_tokens": {"a": "<|extra|>"}}"#,
    "\"<|extra|>\" is no added token"
)]
#[case(
    "byte-level",
    r#"{"added_tokens_decoder": {"421": {"content": "<|x|>"}}}"#,
    "adds tokens: \"<|x|>\""
)]
#[case(
    "byte-level",
    r#"{"added_tokens_decoder": {"421": {"content": "<|tool|>"}}}"#,
    "has the id 421 there"
)]
#[case(
    "byte-level",
    r#"{"added_tokens_decoder": {"420": {"content": "<|tool|>", "lstrip": true}}}"#,
    "has not lstrip false"
)]
#[case(
    "byte-level",
    r#"{"pad_token": "<pad>"}"#,
    "the pad_token is added to it"
)]
#[case(
    "byte-level",
    r#"{"eos_token": "ing"}"#,
    "the eos_token is added to it"
)]
#[case(
    "byte-level",
    r#"{"add_prefix_space": true}"#,
    "add_prefix_space to true"
)]
#[case(
    "byte-level",
    r#"{"split_special_tokens": true}"#,
    "sets split_special_tokens"
)]
#[case(
    "byte-level",
    r#"{"tokenizer_class": "CodeGenTokenizer"}"#,
    "names the class CodeGenTokenizer"
)]
#[case(
    "llama2",
    r#"{"tokenizer_class": "GPT2Tokenizer"}"#,
    "the class GPT2Tokenizer adds its unk_token \"<|endoftext|>\""
)]
#[case("llama2", r#"{"add_bos_token": false}"#, "sets add_bos_token to false")]
#[case(
    "llama2",
    r#"{"add_bos_token": true, "add_eos_token": true}"#,
    "sets add_eos_token to true"
)]
#[case(
    "llama2",
    r#"{"add_eos_token": true}"#,
    "does not set add_bos_token to true"
)]
fn what_changes_the_ids_in_transformers_is_named(
    #[case] fixture: &str,
    #[case] config: &str,
    #[case] why: &str,
) {
    let found = difference(fixture, &[("tokenizer_config.json", config)]).unwrap();
    assert!(found.contains(why), "{found}");
    assert!(found.contains("or encode with --plain-text"), "{found}");
}

#[test]
fn what_the_other_files_change_is_named() {
    let model = [("config.json", r#"{"model_type": "opt"}"#)];
    let found = difference("llama2", &model).unwrap();
    assert!(found.contains("names the model `opt`"), "{found}");
    let added = [("added_tokens.json", r#"{"<|x|>": 9}"#)];
    assert!(
        difference("byte-level", &added)
            .unwrap()
            .contains("adds \"<|x|>\"")
    );
    let map = [(
        "special_tokens_map.json",
        r#"{"unk_token": {"content": "<u>"}}"#,
    )];
    assert!(
        difference("byte-level", &map)
            .unwrap()
            .contains("the unk_token")
    );
}

#[rstest]
#[case("byte-level", r#"{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "pad_token": null}"#)]
#[case("byte-level", r#"{"added_tokens_decoder": {"420": {"content": "<|tool|>", "lstrip": false}}, "add_prefix_space": false}"#)]
#[case(
    "byte-level",
    r#"{"additional_special_tokens": ["<|tool|>"], "model_max_length": 512}"#
)]
#[case(
    "llama2",
    r#"{"tokenizer_class": "TokenizersBackend", "add_bos_token": true, "add_eos_token": false}"#
)]
#[case("llama3", r#"{"add_prefix_space": false}"#)]
#[case("unigram", "{}")]
fn what_leaves_the_ids_alone_is_accepted(#[case] fixture: &str, #[case] config: &str) {
    let model = ("config.json", r#"{"model_type": "llama"}"#);
    let named = config.contains("tokenizer_class");
    let files = [("tokenizer_config.json", config), model];
    let files = if named { &files[..] } else { &files[..1] };
    assert_eq!(difference(fixture, files), None);
}
