//! Plain texts that are read in pieces.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use super::*;
use crate::tokenizer::{HfTokenizer, PieceEncoder, TextStream};

fn tokenizer(name: &str) -> HfTokenizer {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tokenizers");
    HfTokenizer::open(folder.join(name)).unwrap()
}

/// Random lines with letters, marks, spaces and spelled-out special tokens.
fn text(draw: &mut fastrand::Rng, num_bytes: usize) -> String {
    const WORDS: [&str; 12] = [
        "the",
        "größer",
        "  ",
        "\n",
        "\r\n\n",
        "日本語。",
        "don't",
        "<s>",
        "</s>",
        "1234",
        "e\u{301}",
        "▁x",
    ];
    let mut text = String::new();
    while text.len() < num_bytes {
        text += draw.choice(WORDS).unwrap();
        text += if draw.bool() { " " } else { "" };
    }
    text
}

/// Encodes a text alone as `a.txt`, and as a line of JSON, which is never cut.
fn compare(tokenizer: &dyn Tokenizer, text: &str, plain_text: bool, packed: bool) {
    let line = serde_json::json!({"text": text}).to_string();
    let (name, content) = match packed {
        true => ("a.txt.gz", gzip(text)),
        false => ("a.txt", [b"\xEF\xBB\xBF", text.as_bytes()].concat()),
    };
    let dir = folder(&[(name, content), ("b.jsonl", line.into_bytes())]);
    let mut found = Vec::new();
    let mut counts = Vec::new();
    for input in [name, "b.jsonl"] {
        let config = config(dir.path(), &[input]).with_plain_text(plain_text);
        let summary = config.run(tokenizer, |_| ()).unwrap();
        counts.push(summary.counts);
        found.push(
            ["bin", "idx"]
                .map(|ending| fs::read(dir.path().join("out").with_extension(ending)).unwrap()),
        );
        clear(dir.path());
    }
    assert!(found[0] == found[1], "{plain_text}: {text:?}");
    assert_eq!(counts[0], counts[1]);
}

#[rstest]
fn pieces_of_a_text_give_the_files_of_the_whole(
    #[values("byte-level", "llama2", "llama3", "mistral", "unigram")] name: &str,
    #[values(false, true)] plain_text: bool,
) {
    let tokenizer = tokenizer(name);
    let mut draw = fastrand::Rng::new();
    for num_bytes in [0, 900, 9_000] {
        let text = text(&mut draw, num_bytes);
        compare(&tokenizer, &text, plain_text, draw.bool());
    }
    compare(&tokenizer, &"x".repeat(3000), plain_text, false);
}

/// The byte-level tokenizer, which notes the longest text that it encodes.
#[derive(Debug, Default)]
struct Measured(AtomicUsize);

impl Tokenizer for Measured {
    fn vocab_size(&self) -> usize {
        ByteTokenizer.vocab_size()
    }
    fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        self.0.fetch_max(text.len(), Relaxed);
        ByteTokenizer.encode(text)
    }
    fn pieces(&self, _: bool) -> Option<Box<dyn PieceEncoder + '_>> {
        Some(Box::new(MeasuredPieces(self)))
    }
    fn decode(&self, tokens: &[u32]) -> String {
        ByteTokenizer.decode(tokens)
    }
    fn stream(&self) -> Box<dyn TextStream + '_> {
        unreachable!("nothing is generated")
    }
    fn eos(&self) -> u32 {
        ByteTokenizer.eos()
    }
    fn bos(&self) -> Option<u32> {
        None
    }
    fn pad(&self) -> Option<u32> {
        None
    }
    fn hash(&self) -> u64 {
        0
    }
}

#[derive(Debug)]
struct MeasuredPieces<'a>(&'a Measured);

impl PieceEncoder for MeasuredPieces<'_> {
    fn end(&self, text: &str, least: usize) -> Result<Option<usize>, DataError> {
        let at = text.ceil_char_boundary(least);
        Ok((at < text.len()).then_some(at))
    }
    fn encode(&self, piece: &str, _: bool, _: bool) -> Result<Vec<u32>, DataError> {
        if piece.contains("bad") {
            return Err(DataError::Encode {
                tokenizer: "t".into(),
                excerpt: "bad".into(),
                why: "it has no id".into(),
            });
        }
        self.0.encode(piece)
    }
}

#[test]
fn a_text_of_any_size_needs_the_memory_of_a_piece() {
    let dir = folder(&[(
        "a.txt",
        text(&mut fastrand::Rng::new(), 200_000).into_bytes(),
    )]);
    let measured = Measured::default();
    config(dir.path(), &["a.txt"])
        .run(&measured, |_| ())
        .unwrap();
    let longest = measured.0.into_inner();
    assert!(longest < 810, "{longest} bytes were encoded at a time");
}

/// The description has the hash and the size of the text, which are compared too.
#[rstest]
#[case::text("a.txt")]
#[case::lines("b.jsonl")]
#[case::array("c.json")]
#[case::packed("a.txt.gz")]
fn an_interrupted_text_is_continued_in_the_middle(#[case] name: &str) {
    let draw = &mut fastrand::Rng::new();
    let (text, lines) = (text(draw, 20_000), lines(draw, 300));
    let array = format!("[{}]", lines.trim_end().replace('\n', ","));
    let packed = gzip(&text);
    let dir = folder(&[
        ("a.txt", text.clone().into_bytes()),
        ("a.txt.gz", packed),
        ("b.jsonl", lines.into_bytes()),
        ("c.json", array.into_bytes()),
    ]);
    let tokenizer = tokenizer("llama2");
    let config = config(dir.path(), &[name])
        .with_num_workers(1)
        .with_text_hash(true);
    config.run(&tokenizer, |_| ()).unwrap();
    let expected = files(dir.path());
    let found = IndexedDataset::open(dir.path().join("out")).unwrap();
    let found = found.description().unwrap();
    let path = dir.path().join(name);
    if !name.ends_with(".gz") {
        let corpus = crate::corpus::Corpus::from_file(&path).unwrap();
        assert_eq!(found["text_bytes"], corpus.num_bytes().unwrap());
        assert_eq!(found["text_xxh3"], hex(corpus.hash()));
    } else {
        assert_eq!(found["text_bytes"], text.len());
    }
    clear(dir.path());
    let mut resumed = 0;
    for operations in (0..).step_by(9) {
        fuse::allow(dir.path(), operations);
        let found = config.run(&tokenizer, |_| ());
        fuse::remove(dir.path());
        let mut is_resumed = false;
        if found.is_err() {
            let again = config.run(&tokenizer, |event| {
                is_resumed |= matches!(event, PreprocessEvent::Resumed(_));
            });
            again.unwrap();
        }
        resumed += u32::from(is_resumed);
        // The folder may be left if all files have their names.
        let _ = fs::remove_dir_all(dir.path().join("out.megaburn-part"));
        assert!(files(dir.path()) == expected, "{operations}");
        clear(dir.path());
        if found.is_ok() {
            break;
        }
    }
    assert!(resumed > 10, "only {resumed} were continued");
}

#[test]
fn bad_text_is_found_before_the_first_piece_is_written() {
    let mut text = text(&mut fastrand::Rng::new(), 3_000).into_bytes();
    text.push(0xFF);
    let size = text.len();
    let dir = folder(&[("a.txt", text), ("b.txt", b"fine".into())]);
    let config = config(dir.path(), &["a.txt", "b.txt"]);
    let refusal = run(&config).unwrap_err();
    let why = format!(
        "a.txt`: not UTF-8: byte {} of the {size} of the file",
        size - 1
    );
    assert!(refusal.contains(&why), "{refusal}");
    assert_eq!(run(&config.with_skip_bad(true)).unwrap().counts.skipped, 1);
    assert_eq!(documents(dir.path().join("out")), ["fine$"]);
}

#[test]
fn a_piece_that_cannot_be_encoded_is_an_error() {
    let dir = folder(&[("a.txt", ("fine ".repeat(400) + "bad").into_bytes())]);
    let config = config(dir.path(), &["a.txt"]).with_skip_bad(true);
    let refusal = config.run(&Measured::default(), |_| ()).unwrap_err();
    let refusal = refusal.to_string();
    assert!(
        refusal.contains("a.txt` is a text that is encoded in pieces")
            && refusal.contains("it has no id"),
        "{refusal}"
    );
}
