//! Tests `megaburn tokenize` as a user starts it.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use megaburn::data::{HfTokenizer, Tokenizer};
use rstest::rstest;
use tempfile::TempDir;

const TEXT: &str = "Old boats lie on the banks of the river, and the river goes where it goes.\n";

fn folder() -> TempDir {
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("a.txt"), TEXT.repeat(9)).unwrap();
    fs::write(
        dir.path().join("b.jsonl"),
        "{\"text\": \"größere Boote, größere Boote\"}\n",
    )
    .unwrap();
    dir
}

fn tokenize(dir: &Path, args: &str) -> Output {
    let args = args.split_whitespace();
    let mut command = Command::new(env!("CARGO_BIN_EXE_megaburn"));
    command
        .arg("tokenize")
        .args(args)
        .current_dir(dir)
        .env("RAYON_NUM_THREADS", "2");
    command.output().unwrap()
}

#[test]
fn a_tokenizer_is_trained_and_written_and_the_next_command_shown() {
    let dir = folder();
    let args = "--data a.txt --data b.jsonl --vocab 290 --out my/bpe --special <|tool|>";
    let output = tokenize(dir.path(), args);
    let shown = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{shown}");
    let tokenizer = HfTokenizer::open(dir.path().join("my/bpe")).unwrap();
    assert_eq!(tokenizer.vocab_size(), 290);
    assert_eq!(tokenizer.token_to_id("<|tool|>"), Some(3));

    let text = format!("{}\u{1}größere Boote, größere Boote", TEXT.repeat(9));
    let documents: Vec<&str> = text.split('\u{1}').collect();
    let ids = tokenizer.encode_batch(&documents).unwrap().concat().len() + 1;
    let bytes = (text.len() - 1) as f64 / ids as f64;
    for line in [
        "data     2 files: 2 documents, ",
        "vocab    290 tokens\n",
        &format!("text     {ids} tokens, {bytes:.3} bytes per token\n"),
        "wrote    my/bpe/tokenizer.json\n",
        "train    megaburn train --set data.tokenizer=my/bpe/tokenizer.json\n",
    ] {
        assert!(shown.contains(line), "{line}\n{shown}");
    }
}

#[test]
fn the_text_of_a_single_file_is_in_the_next_command() {
    let dir = folder();
    let output = tokenize(dir.path(), "--data a.txt --vocab 5000 --out bpe.json");
    let shown = String::from_utf8(output.stdout).unwrap();
    let next = "train    megaburn train --set data.tokenizer=bpe.json --data a.txt\n";
    assert!(shown.contains(next), "{shown}");
    assert!(
        shown.contains("no more pairs of tokens repeat, 5000 were requested"),
        "{shown}"
    );
}

#[rstest]
#[case(
    "--data no.txt --vocab 300 --out x",
    "data file `no.txt` does not exist"
)]
#[case("--data a.txt --vocab 200 --out x", "a vocabulary of 200 is too small")]
#[case(
    "--data a.txt --vocab 300 --out x --special river",
    "`river` is a single word"
)]
#[case(
    "--data a.txt --vocab many --out x",
    "invalid value 'many' for '--vocab <N>'"
)]
#[case("--data a.txt --out x", "--vocab <N>")]
#[case(
    "--data a.txt --vocab 300 --out there",
    "exists; choose another path, or overwrite it"
)]
fn a_mistake_is_named(#[case] args: &str, #[case] message: &str) {
    let dir = folder();
    fs::create_dir(dir.path().join("there")).unwrap();
    fs::write(dir.path().join("there/tokenizer.json"), "mine").unwrap();
    let output = tokenize(dir.path(), args);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    let message = message.replace('`', "\"");
    assert!(error.replace('`', "\"").contains(&message), "{error}");
    assert!(!dir.path().join("x").exists(), "nothing is left behind");
    assert_eq!(
        fs::read(dir.path().join("there/tokenizer.json")).unwrap(),
        b"mine"
    );
}

#[test]
fn force_overwrites_and_a_place_that_cannot_be_written_is_a_failure() {
    let dir = folder();
    let args = "--data a.txt --vocab 270 --out bpe";
    assert_eq!(tokenize(dir.path(), args).status.code(), Some(0));
    assert_eq!(tokenize(dir.path(), args).status.code(), Some(2));
    let args = "--data a.txt --vocab 280 --out bpe --force";
    assert_eq!(tokenize(dir.path(), args).status.code(), Some(0));
    assert_eq!(
        HfTokenizer::open(dir.path().join("bpe"))
            .unwrap()
            .vocab_size(),
        280
    );
    let output = tokenize(dir.path(), "--data a.txt --vocab 270 --out a.txt/bpe");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
}
