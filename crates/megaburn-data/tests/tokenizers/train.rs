//! Tests of tokenizers that are trained here.

use std::{fs, path::Path, sync::LazyLock};

use megaburn_data::{
    BOS, Corpus, EOS, HfTokenizer, PAD, SyntheticKind, Tokenizer, TokenizerTrainer,
    TrainedTokenizer,
};
use proptest::prelude::*;
use rstest::rstest;
use serde_json::Value;
use tempfile::TempDir;

fn corpus() -> Corpus {
    let line = |i: usize| {
        format!(
            "    let value_{} = compute({}, \"größer\");\n",
            i % 7,
            i * i
        )
    };
    let text = |seed: usize| (seed..seed + 60).map(line).collect::<String>() + &" ".repeat(seed);
    Corpus::from_documents("t", (0..20).map(text).collect()).unwrap()
}

fn train(vocab_size: usize) -> TrainedTokenizer {
    TokenizerTrainer::new(vocab_size).train(&corpus()).unwrap()
}

fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let file = |entry: fs::DirEntry| {
        (
            entry.file_name().into_string().unwrap(),
            fs::read(entry.path()).unwrap(),
        )
    };
    let mut files: Vec<_> = entries.map(file).collect();
    files.sort();
    files
}

#[test]
fn the_same_corpus_gives_the_same_files() {
    let a = TempDir::new().unwrap();
    let b = TempDir::new().unwrap();
    train(400).save(a.path(), false).unwrap();
    for _ in 0..5 {
        train(400).save(b.path(), true).unwrap();
        assert!(files(a.path()) == files(b.path()));
    }
    let names: Vec<String> = files(a.path()).into_iter().map(|(name, _)| name).collect();
    assert_eq!(
        names,
        ["tokenizer.json", "tokenizer_config.json"],
        "nothing else is left behind"
    );
}

#[test]
fn what_is_saved_is_what_was_trained() {
    let dir = TempDir::new().unwrap();
    let trainer = TokenizerTrainer::new(380).with_special_tokens(["<|tool|>".to_string()]);
    let trained = trainer.train(&corpus()).unwrap();
    let file = trained.save(dir.path().join("a/b"), false).unwrap();
    assert_eq!(file, dir.path().join("a/b/tokenizer.json"));
    let mine = trained.tokenizer();
    let read = HfTokenizer::open(dir.path().join("a/b")).unwrap();
    assert_eq!((mine.vocab_size(), mine.hash()), (380, read.hash()));
    assert_eq!(read.vocab_size(), 380);
    let id = |token| read.token_to_id(token);
    assert_eq!(
        (id(BOS), id(EOS), id(PAD), id("<|tool|>")),
        (Some(0), Some(1), Some(2), Some(3))
    );
    assert_eq!((read.bos(), read.eos(), read.pad()), (Some(0), 1, Some(2)));
    let text = "let value_3 = größer <|tool|>";
    assert_eq!(read.encode(text).unwrap(), mine.encode(text).unwrap());
    assert!(!read.encode(text).unwrap().contains(&3));
    assert_eq!(read.encode_prompt(text).unwrap().last(), Some(&3));
    let config = fs::read(dir.path().join("a/b/tokenizer_config.json")).unwrap();
    let config: Value = serde_json::from_slice(&config).unwrap();
    assert_eq!(config["tokenizer_class"], "PreTrainedTokenizerFast");
    assert_eq!(config["eos_token"], EOS);
}

#[test]
fn a_larger_vocabulary_needs_fewer_tokens() {
    let text = corpus().documents().concat();
    let count = |vocab| train(vocab).tokenizer().encode(&text).unwrap().len();
    let none = count(259);
    let some = count(300);
    let many = count(400);
    assert_eq!(none, text.len(), "without merges a token is a byte");
    assert!(many < some && some < none, "{none} {some} {many}");
}

proptest! {
    #[test]
    fn any_text_comes_back(text in "\\PC{0,40}[\u{0}-\u{ff}]{0,9}") {
        static TRAINED: LazyLock<[TrainedTokenizer; 2]> = LazyLock::new(|| [259, 400].map(train));
        for trained in TRAINED.iter() {
            let tokenizer = trained.tokenizer();
            let ids = tokenizer.encode(&text).unwrap();
            prop_assert!(ids.iter().all(|&id| 3 <= id && (id as usize) < tokenizer.vocab_size()));
            prop_assert_eq!(&tokenizer.decode(&ids), &text);
        }
    }
}

#[test]
fn a_text_without_repeats_gives_a_smaller_vocabulary() {
    let corpus = Corpus::from_documents("t", vec!["abcab".into()]).unwrap();
    let trained = TokenizerTrainer::new(1000).train(&corpus).unwrap();
    assert_eq!(
        trained.tokenizer().vocab_size(),
        260,
        "only `ab` is there twice"
    );
}

#[test]
fn nothing_is_overwritten_unasked() {
    let dir = TempDir::new().unwrap();
    let json = dir.path().join("mine.json");
    assert_eq!(train(300).save(&json, false).unwrap(), json);
    let before = files(dir.path());
    let error = train(301).save(&json, false).unwrap_err().to_string();
    assert_eq!(
        error,
        format!(
            "`{}` exists; choose another path, or overwrite it with --force",
            json.display()
        )
    );
    let error = train(301).save(dir.path(), false).unwrap_err().to_string();
    assert!(error.contains("tokenizer_config.json` exists"), "{error}");
    assert!(files(dir.path()) == before);
    train(301).save(&json, true).unwrap();
    assert_eq!(HfTokenizer::open(&json).unwrap().vocab_size(), 301);
    let error = train(300)
        .save(dir.path().join("tokenizer_config.json"), true)
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("is the name of the file next to it"),
        "{error}"
    );
    let error = train(300)
        .save(json.join("below"), false)
        .unwrap_err()
        .to_string();
    assert!(error.starts_with("cannot write `"), "{error}");
}

#[rstest]
#[case("", "special token \"\" is empty")]
#[case("<|pad|>", "special token \"<|pad|>\" already exists")]
#[case("a", "special token \"a\" is a single word, which could occur in text")]
#[case(" tool", "special token \" tool\" is a single word")]
fn a_special_token_that_text_could_be_is_refused(#[case] token: &str, #[case] message: &str) {
    let trainer = TokenizerTrainer::new(400).with_special_tokens([token.to_string()]);
    let error = trainer.train(&corpus()).unwrap_err().to_string();
    assert!(
        error.starts_with(message) && error.contains("like `<|tool|>`"),
        "{error}"
    );
}

#[test]
fn a_vocabulary_without_room_and_a_corpus_without_text_are_refused() {
    let error = TokenizerTrainer::new(258)
        .train(&corpus())
        .unwrap_err()
        .to_string();
    assert_eq!(
        error,
        "a vocabulary of 258 is too small: 256 bytes and 3 special tokens need 259"
    );
    let symbols = Corpus::synthetic(SyntheticKind::Markov, 1, 100).unwrap();
    let error = TokenizerTrainer::new(300)
        .train(&symbols)
        .unwrap_err()
        .to_string();
    assert!(error.contains("is empty"), "{error}");
}
