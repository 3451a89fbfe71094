//! Processes that are killed while they encode.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use megaburn_test_support::text::fresh_seed;

use super::{files, start, succeed};

/// Bytes of text; enough for several saved states on any machine.
const TEXT: usize = 24 << 20;
/// A tokenizer that encodes slowly, because it does not cut text into words.
const TOKENIZER: &str = "{F}/tokenizers/unigram";

/// Writes random words as lines of JSON.
fn write_corpus(path: &Path, seed: u64) {
    let mut draw = fastrand::Rng::with_seed(seed);
    let word = |draw: &mut fastrand::Rng| {
        let length = draw.usize(2..10);
        (0..length).map(|_| draw.lowercase()).collect::<String>()
    };
    let words: Vec<String> = (0..20_000).map(|_| word(&mut draw)).collect();
    let mut lines = String::new();
    while lines.len() < TEXT {
        let count = draw.usize(50..1000);
        let text: Vec<&str> = (0..count)
            .map(|_| draw.choice(&words).unwrap().as_str())
            .collect();
        lines += &format!("{{\"text\": \"{}\"}}\n", text.join(" "));
    }
    fs::write(path, lines).unwrap();
}

/// The number of states that are saved in the journal.
fn num_states(dir: &Path) -> usize {
    let journal = fs::read(dir.join("set.megaburn-part/journal")).unwrap_or_default();
    let lines = journal.iter().filter(|byte| **byte == b'\n').count();
    lines.saturating_sub(1)
}

#[test]
fn a_process_that_is_killed_at_any_moment_is_continued_to_the_same_files() {
    let dir = tempfile::tempdir().unwrap();
    let seed = fresh_seed();
    let mut draw = fastrand::Rng::with_seed(seed);
    write_corpus(&dir.path().join("corpus.jsonl"), seed);
    let line = format!("preprocess {{D}}/corpus.jsonl --tokenizer {TOKENIZER} --append-eod");
    succeed(dir.path(), &format!("{line} --out {{D}}/whole"));
    let line = format!("{line} --workers 1 --out {{D}}/set");
    for kills in 1..=2 {
        let before = num_states(dir.path());
        let mut process = start(dir.path(), &line);
        process.wait_until(|| num_states(dir.path()) > before);
        let moment = Instant::now() + Duration::from_millis(draw.u64(0..400));
        process.wait_until(|| Instant::now() >= moment);
        process.kill_all();
        assert!(!dir.path().join("set.idx").exists(), "{kills}");
    }
    let shown = succeed(dir.path(), &line);
    assert!(shown.contains("resumed  after "), "{shown}");
    let contents = |start: &str| {
        let files = files(dir.path(), start).into_iter();
        files.map(|(_, content)| content).collect::<Vec<_>>()
    };
    let (set, whole) = (contents("set."), contents("whole."));
    assert!(set.len() == 3 && set == whole, "other bytes, seed {seed}");
}

#[test]
fn work_with_another_setting_is_not_continued_but_can_be_dropped() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(&dir.path().join("corpus.jsonl"), fresh_seed());
    let line = format!("preprocess {{D}}/corpus.jsonl --tokenizer {TOKENIZER} --out {{D}}/set");
    let mut process = start(dir.path(), &format!("{line} --workers 1"));
    process.wait_until(|| num_states(dir.path()) > 0);
    let ended = super::data(dir.path(), &line);
    assert_eq!(ended.code, Some(2), "{ended:#?}");
    assert!(
        ended.stderr.contains("is being written by another process"),
        "{ended:#?}"
    );
    process.kill_all();

    let other = "preprocess {D}/corpus.jsonl --tokenizer byte --out {D}/set";
    let ended = super::data(dir.path(), other);
    assert_eq!(ended.code, Some(2), "{ended:#?}");
    let message = "unfinished work that differs: its tokenizer";
    assert!(ended.stderr.contains(message), "{ended:#?}");
    succeed(dir.path(), &format!("{other} --force"));
    assert_eq!(files(dir.path(), "set").len(), 3);
}
