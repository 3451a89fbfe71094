//! Data sets that are written, inspected, merged and split.

use std::fs;

use rstest::rstest;
use tempfile::TempDir;

use super::{data, files, fixture, succeed};
use crate::runs::child::Ranks;

const LINES: &str = "{\"text\": \"ab\", \"meta\": {\"title\": \"t\"}}\n\n{\"text\": \"\"}\n\
    {\"text\": [\"c\", \"de\"]}\n";

fn folder() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("texts")).unwrap();
    let files = [
        ("a.jsonl", LINES),
        ("bad.jsonl", "{\"text\": \"x\"}\n{\"text\": null}\n"),
        ("texts/b.txt", "plain\n"),
        ("texts/c.md", "# left out"),
        ("mine.bin", "mine"),
    ];
    for (name, text) in files {
        fs::write(dir.path().join(name), text).unwrap();
    }
    dir
}

#[test]
fn the_files_are_those_of_megatrons_script() {
    let dir = folder();
    let shown = succeed(
        dir.path(),
        "preprocess {F}/megatron-preprocess/corpus.jsonl --tokenizer {F}/tokenizers/llama3 \
         --json-keys text title parts --append-eod --workers 2 --output-prefix {D}/llama3",
    );
    assert!(
        shown.contains("vocab    403 ids, written as uint16\n"),
        "{shown}"
    );
    assert!(shown.contains("total    60 documents, "), "{shown}");
    for key in ["text", "title", "parts"] {
        for ending in ["bin", "idx"] {
            let name = format!("llama3_{key}_document.{ending}");
            let theirs = fs::read(fixture("megatron-preprocess").join(&name)).unwrap();
            assert!(
                fs::read(dir.path().join(&name)).unwrap() == theirs,
                "{name}"
            );
        }
    }
}

#[test]
fn a_data_set_is_written_shown_merged_and_split() {
    let dir = folder();
    let made = "preprocess {D}/a.jsonl {D}/texts --tokenizer byte --append-eod --out {D}/set";
    let shown = succeed(dir.path(), made);
    let size = LINES.len() + "plain\n".len();
    for line in [
        &format!("data     2 files, {size} bytes\n"),
        "note     1 file of other kinds in folders left out\n",
        "total    4 documents, 14 tokens, 1 document without tokens\n",
        &format!("wrote    {0}/set.bin, {0}/set.idx\n", dir.path().display()),
    ] {
        assert!(shown.contains(line), "{line}\n{shown}");
    }
    let names: Vec<_> = files(dir.path(), "set")
        .into_iter()
        .map(|(name, _)| name)
        .collect();
    assert_eq!(names, ["set.bin", "set.idx", "set.megaburn"]);

    let shown = succeed(dir.path(), "inspect {D}/set --document 2 --tokenizer byte");
    assert!(
        shown.starts_with("4 documents, 4 sequences, 14 tokens\n"),
        "{shown}"
    );
    let document = "document 2: 4 tokens in 2 sequences\n  99\n  \"c\"\n  100 101 257\n  \"de\"\n";
    assert!(
        shown.contains(document) && shown.contains("append_eod true"),
        "{shown}"
    );

    let shown = succeed(dir.path(), "stats {D}/set.bin --svg {D}/set.svg");
    assert!(
        shown.starts_with("4 documents, 4 sequences, 14 tokens\n"),
        "{shown}"
    );
    assert!(
        shown.contains("min 0, median 3, mean 3.5, 90% 7, 99% 7, max 7\n"),
        "{shown}"
    );
    assert!(
        fs::read_to_string(dir.path().join("set.svg"))
            .unwrap()
            .starts_with("<svg")
    );

    let shown = succeed(dir.path(), "merge {D}/set {D}/set --out {D}/twice");
    assert!(
        shown.contains("twice.idx: 8 documents, 28 tokens\n"),
        "{shown}"
    );
    let shown = succeed(dir.path(), "split {D}/twice --split 1,1 --out {D}/half");
    assert!(
        shown.contains("half_train.idx: 4 documents, 14 tokens\n"),
        "{shown}"
    );
    for half in ["half_train", "half_valid"] {
        for ending in ["bin", "idx"] {
            let read = |name: &str| fs::read(dir.path().join(format!("{name}.{ending}"))).unwrap();
            assert!(read(half) == read("set"), "{half}.{ending}");
        }
    }
    assert!(!dir.path().join("half_test.bin").exists());
}

#[test]
fn bad_records_are_counted_if_they_are_to_be_skipped() {
    let dir = folder();
    let shown = succeed(
        dir.path(),
        "preprocess {D}/bad.jsonl --tokenizer byte --on-error skip --out {D}/set",
    );
    assert!(
        shown.contains("bad.jsonl`, line 2: field `text` is null, not a string\n"),
        "{shown}"
    );
    assert!(
        shown.contains("total    1 document, 1 token, 1 record skipped\n"),
        "{shown}"
    );
    // The first of two fields is missing in the third record.
    let shown = succeed(
        dir.path(),
        "preprocess {D}/a.jsonl --tokenizer byte --json-keys text,meta.title --on-error skip \
         --out {D}/keys",
    );
    assert!(
        shown.contains("total    1 document, 3 tokens, 2 records skipped\n"),
        "{shown}"
    );
    assert_eq!(files(dir.path(), "keys_meta.title_document").len(), 3);
}

#[rstest]
#[case(
    "preprocess {D}/no.jsonl --tokenizer byte --out {D}/x",
    "no.jsonl` does not exist"
)]
#[case(
    "preprocess {D}/bad.jsonl --tokenizer byte --out {D}/x",
    "bad.jsonl`, line 2: field `text`"
)]
#[case(
    "preprocess {D}/a.jsonl --tokenizer byte --out {D}/mine",
    "mine.bin` exists"
)]
#[case(
    "preprocess {D}/a.jsonl --tokenizer byte --out {D}/mine --force",
    "is not overwritten"
)]
#[case(
    "preprocess {D}/mine.bin --tokenizer byte --out {D}/x",
    "mine.bin` is not text"
)]
#[case(
    "preprocess {D}/*.gz --tokenizer byte --out {D}/x",
    "no file with text was found"
)]
#[case(
    "preprocess {D}/a.jsonl {D}/*.jsonl --tokenizer byte --out {D}/x",
    "is given twice"
)]
#[case(
    "preprocess {D}/a.jsonl --tokenizer {D}/no --out {D}/x",
    "no tokenizer at"
)]
#[case(
    "preprocess {D}/a.jsonl --tokenizer byte --workers 0 --out {D}/x",
    "workers is 0"
)]
#[case(
    "preprocess {D}/a.jsonl --tokenizer byte --field body --out {D}/x",
    "no field `body`"
)]
#[case("preprocess --tokenizer byte --out {D}/x", "<INPUT>...")]
#[case("preprocess {D}/a.jsonl --out {D}/x", "--tokenizer <TOKENIZER>")]
#[case("inspect {D}/x", "x.idx` does not exist")]
#[case("inspect {D}/mine", "mine.idx` does not exist")]
#[case(
    "inspect {F}/megatron-dataset/data_document --document 200",
    "has 200 documents"
)]
#[case("merge --out {D}/x", "<PREFIX>...")]
#[case(
    "split {F}/megatron-dataset/data_document --split 1,-1 --out {D}/x",
    "-1 is not a weight"
)]
#[case(
    "split {F}/megatron-dataset/data_document --split 0,0 --out {D}/x",
    "is not positive"
)]
#[case(
    "split {F}/megatron-dataset/data_document --split 999,1 --out {D}/x",
    "would have none"
)]
fn a_mistake_is_named_and_leaves_nothing(#[case] line: &str, #[case] message: &str) {
    let dir = folder();
    let ended = data(dir.path(), line);
    assert_eq!(ended.code, Some(2), "{ended:#?}");
    assert!(ended.stderr.contains(message), "{message}\n{ended:#?}");
    assert!(!ended.stderr.contains("panicked"), "{ended:#?}");
    let mut names: Vec<_> = files(dir.path(), "m").into_iter().collect();
    assert_eq!(names.remove(0), ("mine.bin".into(), b"mine".into()));
    assert!(names.is_empty() && files(dir.path(), "x").is_empty());
}

#[test]
fn a_full_disk_is_a_failure_that_names_the_file() {
    let dir = folder();
    fs::write(dir.path().join("long.txt"), "0123456789\n".repeat(40_000)).unwrap();
    let command = format!(
        "ulimit -f 200\n{} data preprocess long.txt --tokenizer byte --out set",
        env!("CARGO_BIN_EXE_megaburn-under-test")
    );
    let ended = Ranks::shell(&command, dir.path()).wait_all().remove(0);
    assert_eq!(ended.code, Some(1), "{ended:#?}");
    assert!(
        ended
            .stderr
            .contains("cannot write `set.megaburn-part/0.bin`"),
        "{ended:#?}"
    );
    assert!(files(dir.path(), "set").is_empty());
    succeed(
        dir.path(),
        "preprocess {D}/long.txt --tokenizer byte --out {D}/set",
    );
}
