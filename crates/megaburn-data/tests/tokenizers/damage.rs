//! Tests that damaged, cut and unclear files of SentencePiece, tiktoken and BERT give one error
//! that names the file and says why.

use std::{fs, path::Path};

use megaburn_data::{HfTokenizer, Tokenizer};
use rstest::rstest;
use tempfile::TempDir;

use crate::fixtures;

/// A folder with a copy of the files of a fixture, but for its hashes.
fn copy(name: &str) -> TempDir {
    let dir = TempDir::new().unwrap();
    for entry in fs::read_dir(fixtures("tokenizer-files").join(name)).unwrap() {
        let path = entry.unwrap().path();
        if !path.ends_with("expected.txt") {
            fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
        }
    }
    dir
}

fn refusal(path: &Path) -> String {
    let error = HfTokenizer::open(path).unwrap_err().to_string();
    assert!(error.contains(&path.display().to_string()), "{error}");
    error
}

#[rstest]
#[case("sp-unigram")]
#[case("sp-bpe-llama")]
fn a_cut_model_is_refused_at_every_length(#[case] name: &str) {
    let dir = copy(name);
    let path = dir.path().join("tokenizer.model");
    let whole = fs::read(&path).unwrap();
    // The last field is an empty one that is not needed.
    for length in (0..whole.len() - 2)
        .step_by(whole.len() / 150)
        .chain([whole.len() - 3])
    {
        fs::write(&path, &whole[..length]).unwrap();
        let error = refusal(&path);
        assert!(error.contains("cut"), "{length}: {error}");
    }
}

#[test]
fn a_damaged_model_is_refused_or_read_but_never_panics() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut refused = 0;
    for name in ["sp-unigram", "sp-unigram-bytes", "sp-bpe-suffix"] {
        let dir = copy(name);
        let path = dir.path().join("tokenizer.model");
        let whole = fs::read(&path).unwrap();
        for _ in 0..40 {
            let mut bytes = whole.clone();
            for _ in 0..rng.usize(1..4) {
                let at = rng.usize(..bytes.len());
                bytes[at] = rng.u8(..);
            }
            fs::write(&path, bytes).unwrap();
            match HfTokenizer::open(&path) {
                Ok(tokenizer) => {
                    let text = "Ａ the\u{301} rivers ﬁ <tool>\t今日 x";
                    let ids = tokenizer.encode(text).unwrap();
                    tokenizer.decode(&ids);
                    tokenizer.encode_prompt(text).unwrap();
                }
                Err(_) => refused += 1,
            }
        }
    }
    assert!(refused > 0);
}

#[test]
fn a_file_that_is_no_model_is_named() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("tokenizer.model");
    for (bytes, why) in [
        (&b""[..], "no trainer_spec"),
        (b"hello", "the unknown type"),
        (b"{\"model\": 1}", "cannot be used as a tokenizer"),
        (b"\x0a\x02\x15\x00", "token 0: a field at byte"),
        (b"\x0a\x03\x0a\x01\xff", "token 0: byte 4 is not UTF-8"),
        (b"\x0a\x05\x15\x00\x00\xc0\x7f", "token 0: its score is NaN"),
        (b"\x12\x02\x18\x04", "its model type is 4"),
    ] {
        fs::write(&path, bytes).unwrap();
        let error = refusal(&path);
        assert!(error.contains(why), "{bytes:?}: {error}");
    }
}

#[test]
fn a_cut_line_of_a_rank_file_is_named() {
    let dir = copy("tiktoken-qwen");
    let path = dir.path().join("qwen.tiktoken");
    let whole = fs::read_to_string(&path).unwrap();
    for length in (1..whole.len()).step_by(97) {
        let part = &whole[..length];
        if part.ends_with('\n') || whole[length..].starts_with('\n') {
            continue;
        }
        fs::write(&path, part).unwrap();
        let line = format!("line {} ", part.lines().count());
        let error = refusal(&path);
        assert!(
            error.contains(&line) || error.contains("of the 256 bytes"),
            "{length}: {error}"
        );
    }
    for (text, why) in [
        ("", "it has ranks for 0 of the 256 bytes"),
        ("IQ== 0\nIg== x\n", "line 2 has a rank that is no number"),
        ("IQ== 0\nI 1\n", "line 2 has a token that is not base64"),
        ("IQ== 0\nIg==\n", "line 2 has no rank"),
        (
            "IQ== 0\nIQ== 1\n",
            "line 2 has a token or a rank (1) of an earlier line",
        ),
        (
            "IQ== 0\nIg== 0\n",
            "line 2 has a token or a rank (0) of an earlier line",
        ),
    ] {
        fs::write(&path, text).unwrap();
        let error = refusal(&path);
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn ranks_without_a_known_division_of_texts_ask_for_it() {
    let dir = copy("tiktoken-cl100k");
    let other = dir.path().join("other.tiktoken");
    fs::rename(dir.path().join("cl100k_base.tiktoken"), &other).unwrap();
    let error = refusal(&other);
    assert!(
        error.contains("write \"tiktoken_encoding\" into"),
        "{error}"
    );
    let config = dir.path().join("tokenizer_config.json");
    fs::write(&config, r#"{"tiktoken_encoding": "cl"}"#).unwrap();
    let error = HfTokenizer::open(&other).unwrap_err().to_string();
    assert!(
        error.contains("is \"cl\"; give one of llama3, cl100k_base"),
        "{error}"
    );
    let mut hashes = Vec::new();
    for name in ["llama3", "cl100k_base", "o200k_base", "qwen", "r50k_base"] {
        fs::write(&config, format!("{{\"tiktoken_encoding\": {name:?}}}")).unwrap();
        let tokenizer = HfTokenizer::open(dir.path()).unwrap();
        assert_eq!(tokenizer.path(), other);
        hashes.push(tokenizer.hash());
    }
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), 5, "the division is part of the hash");
    fs::write(dir.path().join("second.tiktoken"), "").unwrap();
    let error = refusal(dir.path());
    assert!(error.contains("the folder has several"), "{error}");
}

#[rstest]
#[case("added_tokens.json", r#"{"<x>": 3}"#, "gives \"<x>\" the id 3, but")]
#[case("added_tokens.json", r#"{"<x>": -1}"#, "\"<x>\" has no id")]
#[case(
    "tokenizer_config.json",
    r#"{"added_tokens_decoder": {"a": {"content": "<x>"}}}"#,
    "added_tokens_decoder has no token with an id"
)]
fn an_added_token_that_cannot_be_added_is_named(
    #[case] file: &str,
    #[case] text: &str,
    #[case] why: &str,
) {
    for name in ["sp-unigram", "tiktoken-cl100k"] {
        let dir = copy(name);
        fs::write(dir.path().join(file), text).unwrap();
        let error = HfTokenizer::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains(file) && error.contains(why), "{error}");
    }
}

#[test]
fn a_start_token_that_is_asked_for_but_not_named_is_an_error() {
    let dir = copy("tiktoken-cl100k");
    fs::write(
        dir.path().join("tokenizer_config.json"),
        r#"{"add_bos_token": true}"#,
    )
    .unwrap();
    let error = HfTokenizer::open(dir.path()).unwrap_err().to_string();
    assert!(
        error.contains("it sets add_bos_token, but no file names a bos_token"),
        "{error}"
    );
}

#[rstest]
#[case("the\nriver\n", "it has no token \"[UNK]\"")]
#[case("[UNK]\n[CLS]\nthe", "it has no token \"[SEP]\"")]
fn a_vocabulary_without_its_special_tokens_is_named(#[case] text: &str, #[case] why: &str) {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("vocab.txt");
    fs::write(&path, text).unwrap();
    assert!(refusal(&path).contains(why));
}

#[test]
fn a_vocabulary_follows_its_settings() {
    let dir = copy("bert-uncased");
    let config = dir.path().join("tokenizer_config.json");
    let hash = HfTokenizer::open(dir.path()).unwrap().hash();
    fs::write(&config, r#"{"do_lower_case": false}"#).unwrap();
    assert_ne!(HfTokenizer::open(dir.path()).unwrap().hash(), hash);
    fs::write(&config, r#"{"do_lower_case": "no"}"#).unwrap();
    let error = HfTokenizer::open(dir.path()).unwrap_err().to_string();
    assert!(
        error.contains("one of do_lower_case, strip_accents"),
        "{error}"
    );
    fs::write(
        &config,
        r#"{"added_tokens_decoder": {"9999": {"content": "<x>"}}}"#,
    )
    .unwrap();
    let error = HfTokenizer::open(dir.path()).unwrap_err().to_string();
    assert!(
        error.contains("\"<x>\" an id that does not follow"),
        "{error}"
    );
}

#[test]
fn a_folder_with_several_files_has_the_first_by_rule() {
    let dir = copy("bert-uncased");
    let opened = || HfTokenizer::open(dir.path()).unwrap().path().to_path_buf();
    assert_eq!(opened(), dir.path().join("vocab.txt"));
    let add = |name: &str, file: &str| {
        let from = fixtures("").join(name).join(file);
        fs::copy(from, dir.path().join(file)).unwrap();
        dir.path().join(file)
    };
    let ranks = add("tokenizer-files/tiktoken-qwen", "qwen.tiktoken");
    fs::write(
        dir.path().join("generation_config.json"),
        r#"{"eos_token_id": 2}"#,
    )
    .unwrap();
    assert_eq!(opened(), ranks);
    let model = add("tokenizer-files/sp-unigram", "tokenizer.model");
    assert_eq!(opened(), model);
    let json = add("tokenizers/llama2", "tokenizer.json");
    assert_eq!(opened(), json);
}

#[rstest]
#[case("sp-unigram", "tokenizer.model")]
#[case("sp-bpe-no-prefix", "tokenizer.model")]
#[case("tiktoken-llama3", "tokenizer.model")]
#[case("tiktoken-qwen", "qwen.tiktoken")]
#[case("bert-cased", "vocab.txt")]
fn a_copy_of_any_file_with_the_name_tokenizer_json_is_the_same_tokenizer(
    #[case] name: &str,
    #[case] file: &str,
) {
    let dir = copy(name);
    let own = HfTokenizer::open(dir.path()).unwrap();
    let renamed = dir.path().join("tokenizer.json");
    fs::rename(dir.path().join(file), &renamed).unwrap();
    let copied = HfTokenizer::open(dir.path()).unwrap();
    assert_eq!(copied.path(), renamed);
    assert_eq!(
        (copied.hash(), copied.prompt_hash()),
        (own.hash(), own.prompt_hash())
    );
    let text = "The river's old boats <tool> 今日 </s>";
    assert_eq!(copied.encode(text).unwrap(), own.encode(text).unwrap());
    assert_eq!(
        copied.encode_prompt(text).unwrap(),
        own.encode_prompt(text).unwrap()
    );
}

#[test]
fn what_changes_the_ids_of_prompts_is_part_of_the_hash() {
    let dir = copy("sp-bpe-llama");
    let config = dir.path().join("tokenizer_config.json");
    let mut hashes = Vec::new();
    for text in [
        r#"{}"#,
        r#"{"legacy": false}"#,
        r#"{"add_bos_token": true}"#,
        r#"{"add_eos_token": true}"#,
        r#"{"additional_special_tokens": ["<x>"]}"#,
        r#"{"added_tokens_decoder": {"900": {"content": "<x>"}}}"#,
    ] {
        fs::write(&config, text).unwrap();
        hashes.push(HfTokenizer::open(dir.path()).unwrap().prompt_hash());
    }
    let json = fixtures("tokenizers/llama2/tokenizer.json");
    fs::copy(json, dir.path().join("tokenizer.json")).unwrap();
    let plain = HfTokenizer::open(dir.path()).unwrap().hash();
    for class in ["TokenizersBackend", "LlamaTokenizer"] {
        fs::write(&config, format!("{{\"tokenizer_class\": {class:?}}}")).unwrap();
        let tokenizer = HfTokenizer::open(dir.path()).unwrap();
        assert_eq!(
            tokenizer.hash(),
            plain,
            "training text is encoded by the file alone"
        );
        hashes.push(tokenizer.prompt_hash());
    }
    let all = hashes.len();
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), all);
}
