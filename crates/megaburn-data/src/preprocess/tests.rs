//! Interruptions of the writer, and input of all kinds.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use flate2::{Compression, write::GzEncoder};
use rstest::rstest;
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use tempfile::TempDir;

use super::*;
use crate::{indexed::IndexedDataset, part::fuse, tokenizer::ByteTokenizer};

mod concurrent;
mod damage;
#[cfg(feature = "parquet")]
mod parquet;
mod pieces;
mod sentences;

/// A configuration that saves its state after every batch of a few documents.
fn config(dir: &Path, inputs: &[&str]) -> PreprocessConfig {
    let inputs = inputs.iter().map(|input| dir.join(input)).collect();
    let mut config = PreprocessConfig::new(inputs, dir.join("out")).with_append_eod(true);
    config.batch_bytes = 400;
    config.save_interval = Duration::ZERO;
    config.with_num_workers(2)
}

fn run(config: &PreprocessConfig) -> Result<PreprocessSummary, String> {
    let run = config.run(&ByteTokenizer, |_| ());
    run.map_err(|error| error.to_string())
}

/// Random documents, some of them empty, as lines of JSON.
fn lines(draw: &mut fastrand::Rng, count: usize) -> String {
    let line = |_| {
        let length = draw.usize(0..60);
        let text: String = (0..length).map(|_| draw.alphanumeric()).collect();
        format!("{{\"text\": \"{text}\", \"other\": [\"{text}\", \"x\"]}}\n")
    };
    (0..count).map(line).collect()
}

fn names(dir: &Path) -> Vec<String> {
    let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name();
    let names = fs::read_dir(dir).unwrap().map(name);
    let mut names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

/// The files of a finished run, with their contents.
fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let with_content = |name: String| {
        let content = fs::read(dir.join(&name)).unwrap();
        (name, content)
    };
    let outputs = names(dir)
        .into_iter()
        .filter(|name| name.starts_with("out"));
    outputs.map(with_content).collect()
}

/// Removes the files of a finished run.
fn clear(dir: &Path) {
    for (name, _) in files(dir) {
        fs::remove_file(dir.join(name)).unwrap();
    }
}

fn folder(inputs: &[(&str, Vec<u8>)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in inputs {
        fs::write(dir.path().join(name), content).unwrap();
    }
    dir
}

fn gzip(text: &str) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    std::io::Write::write_all(&mut encoder, text.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

/// The documents of a data set as texts, with `$` for the end of one.
fn documents(prefix: PathBuf) -> Vec<String> {
    let set = IndexedDataset::open(prefix).unwrap();
    set.check().unwrap();
    let text = |tokens: Vec<i64>| -> String {
        let of = |token: i64| match u8::try_from(token) {
            Ok(byte) => byte as char,
            Err(_) => '$',
        };
        tokens.into_iter().map(of).collect()
    };
    let document = |index| {
        let sequences = set.document(index).unwrap().into_iter();
        sequences.map(text).collect::<Vec<_>>().join("|")
    };
    (0..set.num_documents()).map(document).collect()
}

/// Inputs of all kinds and compressions.
const MIXED: [&str; 5] = ["a.jsonl", "b.txt", "c.jsonl.gz", "d.json", "e.ndjson.zst"];

fn mixed(draw: &mut fastrand::Rng) -> TempDir {
    let array = lines(draw, 30).trim_end().replace('\n', ",\n");
    folder(&[
        (MIXED[0], lines(draw, 40).into_bytes()),
        (MIXED[1], b"one text\nof two lines".into()),
        (MIXED[2], gzip(&lines(draw, 30))),
        (MIXED[3], format!(" [{array}]\n").into_bytes()),
        (
            MIXED[4],
            compress_to_vec(lines(draw, 30).as_bytes(), CompressionLevel::Fastest),
        ),
    ])
}

#[test]
fn work_that_is_interrupted_anywhere_continues_to_the_same_bytes() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut draw = fastrand::Rng::with_seed(seed);
    let dir = mixed(&mut draw);
    let config = config(dir.path(), &MIXED);
    let whole = run(&config).unwrap();
    let expected = files(dir.path());
    assert_eq!(whole.counts.documents, 40 + 1 + 30 + 30 + 30);
    clear(dir.path());

    let mut interrupted = 0;
    for _ in 0..100 {
        // Several interruptions, some of them soon after the start, then no more.
        for _ in 0..draw.u64(1..4) {
            fuse::allow(dir.path(), draw.u64(0..150));
            let found = run(&config);
            fuse::remove(dir.path());
            match found {
                Ok(found) => {
                    assert_eq!(found, whole);
                    break;
                }
                Err(error) => {
                    assert!(error.contains("cannot write"), "{error}");
                    interrupted += 1;
                }
            }
        }
        let part = dir.path().join("out.megaburn-part");
        if !dir.path().join("out.idx").exists() || part.join("journal").exists() {
            assert_eq!(run(&config).unwrap(), whole);
        }
        if part.exists() {
            // Only its removal was interrupted.
            let refusal = run(&config).unwrap_err();
            assert!(refusal.contains("out.bin` exists"), "{refusal}");
            assert!(!part.exists(), "seed {seed}");
        }
        assert!(files(dir.path()) == expected, "other bytes, seed {seed}");
        clear(dir.path());
    }
    assert!(interrupted > 50, "only {interrupted} interruptions");
}

#[test]
fn a_disk_that_is_full_from_the_start_leaves_nothing() {
    let dir = mixed(&mut fastrand::Rng::new());
    let config = config(dir.path(), &MIXED);
    let before = names(dir.path());
    for operations in 0..6 {
        fuse::allow(dir.path(), operations);
        let refusal = run(&config).unwrap_err();
        fuse::remove(dir.path());
        assert!(refusal.contains("cannot write `"), "{refusal}");
        // The removal may have failed too, but the next run is not hindered.
        assert!(names(dir.path()).len() <= before.len() + 1);
    }
    run(&config).unwrap();
    assert_eq!(names(dir.path()).len(), before.len() + 3);
}

#[test]
fn a_saved_state_is_kept_after_an_error_and_skipping_continues_it() {
    let text = lines(&mut fastrand::Rng::new(), 400) + "no json\n{\"text\": \"last\"}\n";
    let dir = folder(&[("a.jsonl", text.into_bytes())]);
    let config = config(dir.path(), &["a.jsonl"]);
    let refusal = run(&config).unwrap_err();
    assert!(
        refusal.contains("a.jsonl`, line 401: not valid JSON"),
        "{refusal}"
    );
    assert_eq!(names(dir.path()), ["a.jsonl", "out.megaburn-part"]);
    let mut resumed = 0;
    let skipping = config.with_skip_bad(true);
    let summary = skipping.run(&ByteTokenizer, |event| {
        if let PreprocessEvent::Resumed(counts) = event {
            resumed = counts.documents;
        }
    });
    let counts = summary.unwrap().counts;
    assert_eq!((counts.documents, counts.skipped), (401, 1));
    assert!((1..=400).contains(&resumed), "{resumed}");
    assert_eq!(documents(dir.path().join("out")).last().unwrap(), "last$");
}

#[test]
fn a_changed_source_or_setting_is_not_continued() {
    let text = lines(&mut fastrand::Rng::new(), 200) + "bad\n";
    let dir = folder(&[("a.jsonl", text.into_bytes())]);
    let config = config(dir.path(), &["a.jsonl"]);
    run(&config).unwrap_err();
    let other = run(&config.clone().with_append_eod(false)).unwrap_err();
    assert!(
        other.contains("its append_eod: true before, false now"),
        "{other}"
    );
    fs::write(dir.path().join("a.jsonl"), "{\"text\": \"new\"}\n").unwrap();
    let other = run(&config).unwrap_err();
    assert!(
        other.contains("unfinished work that differs: its files"),
        "{other}"
    );
    run(&config.clone().with_force(true)).unwrap();
    assert_eq!(documents(dir.path().join("out")), ["new$"]);
    assert_eq!(
        names(dir.path()),
        ["a.jsonl", "out.bin", "out.idx", "out.megaburn"]
    );
}

#[test]
fn a_source_that_changes_while_it_is_read_is_named() {
    let text = lines(&mut fastrand::Rng::new(), 200);
    let dir = folder(&[("a.jsonl", text.into_bytes())]);
    let path = dir.path().join("a.jsonl");
    let found = config(dir.path(), &["a.jsonl"]).run(&ByteTokenizer, |event| {
        if let PreprocessEvent::Progress { .. } = event {
            fs::write(&path, "{\"text\": \"new\"}\n").unwrap();
        }
    });
    let refusal = found.unwrap_err().to_string();
    assert!(
        refusal.contains("a.jsonl` was changed while it was read"),
        "{refusal}"
    );
    assert!(!dir.path().join("out.idx").exists());
}

#[test]
fn only_what_megaburn_wrote_is_overwritten_and_only_if_told() {
    let dir = folder(&[("a.jsonl", b"{\"text\": \"x\"}".into())]);
    let config = config(dir.path(), &["a.jsonl"]);
    run(&config).unwrap();
    let first = files(dir.path());
    let refusal = run(&config).unwrap_err();
    assert!(refusal.contains("out.bin` exists"), "{refusal}");
    let forced = config.clone().with_force(true);
    run(&forced).unwrap();
    assert_eq!(files(dir.path()), first);

    // A data set that another program wrote over it is the user's.
    fs::write(dir.path().join("out.idx"), "mine").unwrap();
    let refusal = run(&forced).unwrap_err();
    assert!(refusal.contains("out.bin` is not overwritten"), "{refusal}");
    assert_eq!(fs::read(dir.path().join("out.idx")).unwrap(), b"mine");
    for name in ["out.bin", "out.megaburn"] {
        fs::remove_file(dir.path().join(name)).unwrap();
    }
    let refusal = run(&forced).unwrap_err();
    assert!(refusal.contains("out.idx` is not overwritten"), "{refusal}");

    // A folder of this name that is not of megaburn is the user's too.
    fs::remove_file(dir.path().join("out.idx")).unwrap();
    fs::create_dir(dir.path().join("out.megaburn-part")).unwrap();
    fs::write(dir.path().join("out.megaburn-part/0.bin"), "mine").unwrap();
    let refusal = run(&forced).unwrap_err();
    assert!(refusal.contains("has no journal"), "{refusal}");
    assert_eq!(names(&dir.path().join("out.megaburn-part")), ["0.bin"]);
}

#[rstest]
#[case::blank_lines("a.jsonl", "\n{\"text\": \"a\"}\n \t\r\n\n{\"text\": \"b\"}", &["a$", "b$"])]
#[case::byte_order_mark("a.jsonl", "\u{FEFF}{\"text\": \"a\"}\n", &["a$"])]
#[case::line_ends_of_windows("a.jsonl", "{\"text\": \"a\\r\\nb\"}\r\n{\"text\": \"c\"}\r\n", &["a\r\nb$", "c$"])]
#[case::nul("a.jsonl", "{\"text\": \"a\\u0000b\"}\n", &["a\0b$"])]
#[case::empty_text("a.jsonl", "{\"text\": \"\"}\n{\"text\": \"a\"}\n{\"text\": \"\"}\n", &["", "a$", ""])]
#[case::sentences("a.jsonl", "{\"text\": [\"a\", \"\", \"bc\"]}\n{\"text\": []}\n", &["a|bc$", ""])]
#[case::array("a.json", "\u{FEFF}\n [{\"text\": \"a\"},\n\n {\"text\": \"b\"}] ", &["a$", "b$"])]
#[case::empty_array("a.json", "[]", &[])]
#[case::lines_in_json("a.json", "\n {\"text\": \"a\"}\n{\"text\": \"b\"}\n", &["a$", "b$"])]
#[case::plain("a.txt", "\u{FEFF}a\0\r\nb\n", &["a\0\r\nb\n$"])]
#[case::nothing("a.jsonl", "", &[])]
#[case::only_blank_lines("a.jsonl", "\r\n\n  \n\t", &[])]
#[case::zeros_are_no_padding("a.txt", "a\0\0", &["a\0\0$"])]
#[case::empty_file("a.txt", "", &[""])]
fn documents_are_read_as_they_are(
    #[case] name: &str,
    #[case] content: &str,
    #[case] expected: &[&str],
    #[values(false, true)] packed: bool,
) {
    let packed_name = format!("{name}.gz");
    let (name, content) = match packed {
        false => (name, content.as_bytes().into()),
        true => (packed_name.as_str(), gzip(content)),
    };
    let dir = folder(&[(name, content)]);
    run(&config(dir.path(), &[name])).unwrap();
    assert_eq!(documents(dir.path().join("out")), expected);
}

#[rstest]
#[case(
    "a.jsonl",
    b"{\"text\": \"a\"}\n\n{\"text\": null}\n",
    "line 3: field `text` is null"
)]
#[case(
    "a.jsonl",
    b"{\"body\": \"a\"}\n",
    "line 1: no field `text`, only [body]"
)]
#[case("a.jsonl", b"{\"text\": \"\xFF\"}\n", "line 1: not UTF-8")]
#[case(
    "a.jsonl",
    b"{\"text\": \"a\"}\n{\"text\": \"b",
    "line 2: not valid JSON"
)]
#[case("a.jsonl", b"{\"text\": \"\0\"}\n", "line 1: not valid JSON")]
#[case(
    "a.json",
    b"[{\"text\": \"a\"}, 3]",
    "element 2: a number, not an object"
)]
#[case("a.txt", b"ab\xFF", "a.txt`: not UTF-8: byte 2 of the 3")]
#[case(
    "a.json",
    b"{\"text\": \"a\n{\"text\": \"b\"}\n",
    "line 1: not valid JSON"
)]
#[case("a.json", b"{\"text\": \"a\n\n", "line 1: not valid JSON")]
fn a_bad_record_is_named_or_skipped(
    #[case] name: &str,
    #[case] content: &[u8],
    #[case] message: &str,
) {
    let dir = folder(&[
        (name, content.into()),
        ("z.jsonl", b"{\"text\": \"z\"}".into()),
    ]);
    let config = config(dir.path(), &[name, "z.jsonl"]);
    let refusal = run(&config).unwrap_err();
    assert!(refusal.contains(message), "{refusal}");
    let skipping = config.with_skip_bad(true);
    assert_eq!(run(&skipping).unwrap().counts.skipped, 1);
    assert_eq!(documents(dir.path().join("out")).last().unwrap(), "z$");
}

#[rstest]
#[case("a.json", b"[{\"text\": \"a\"}, ".into(), "its array is not valid JSON (EOF")]
#[case("a.json", b"[{\"text\": \"a\"}] 3".into(), "its array is not valid JSON (trailing")]
#[case("a.json", b"{\n  \"text\": \"a\"\n}\n".into(), "an object that goes over several lines; write each object")]
#[case("a.json", b"\n{\"text\":\n\n  \"a\"}".into(), "an object that goes over several lines; write each object")]
#[case("a.jsonl.gz", gzip("{\"text\": \"a\"}\n")[..12].into(), "cannot be read")]
#[case("a.jsonl.zst", b"{\"text\": \"a\"}\n".into(), "cannot be read")]
fn a_damaged_file_is_never_skipped(
    #[case] name: &str,
    #[case] content: Vec<u8>,
    #[case] message: &str,
) {
    let dir = folder(&[(name, content)]);
    let refusal = run(&config(dir.path(), &[name]).with_skip_bad(true)).unwrap_err();
    assert!(refusal.contains(message), "{refusal}");
    assert!(!dir.path().join("out.bin").exists());
}

#[rstest]
#[case(&["a.b", "a.b"], "`a.b` is given twice; give each field once")]
#[case(&[""], "`` is empty")]
#[case(&["a/b"], "`a/b` cannot be a part of a file name")]
#[case(&["a", "b"], "is one text without fields, and 2 are given")]
#[case(&[], "none is given")]
fn keys_that_name_no_files_are_refused(#[case] keys: &[&str], #[case] message: &str) {
    let dir = folder(&[("a.txt", b"x".into())]);
    let keys = keys.iter().map(|key| key.to_string()).collect();
    let refusal = run(&config(dir.path(), &["a.txt"]).with_json_keys(keys)).unwrap_err();
    assert!(refusal.contains(message), "{refusal}");
    assert_eq!(
        names(dir.path()),
        ["a.txt"],
        "a refused run leaves nothing behind"
    );
}

#[test]
fn one_document_longer_than_everything_and_any_number_of_workers_give_the_same() {
    let long = "A long line without an end, ".repeat(40_000);
    let text = format!("{{\"text\": \"a\"}}\n{{\"text\": \"{long}\"}}\n{{\"text\": \"b\"}}\n");
    let dir = folder(&[("a.jsonl", text.into_bytes())]);
    let mut found = Vec::new();
    for workers in [1, 3, 16] {
        let config = config(dir.path(), &["a.jsonl"]).with_num_workers(workers);
        run(&config.with_force(true)).unwrap();
        found.push(files(dir.path()));
    }
    assert!(found[0] == found[1] && found[1] == found[2]);
    assert_eq!(documents(dir.path().join("out"))[1].len(), long.len() + 1);
}
