//! Data sets that Megatron-LM wrote: made again byte for byte, and read.

use std::fs;
use std::path::{Path, PathBuf};

use megaburn_data::{
    DataError, DocumentSplit, HfTokenizer, IndexedDataset, PreprocessConfig, TextStream, TokenType,
    Tokenizer, merge, split,
};
use proptest::prelude::*;
use rstest::rstest;
use tempfile::TempDir;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures")
        .join(name)
}

/// Both files of a data set.
fn bytes(prefix: &Path) -> [Vec<u8>; 2] {
    [".bin", ".idx"].map(|ending| {
        let path = format!("{}{ending}", prefix.display());
        fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
    })
}

/// A tokenizer whose texts are numbers, for data sets whose tokens are given.
#[derive(Debug)]
struct Numbers {
    vocab_size: usize,
}

impl Tokenizer for Numbers {
    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        Ok(text
            .split(' ')
            .filter_map(|word| word.parse().ok())
            .collect())
    }

    fn decode(&self, tokens: &[u32]) -> String {
        format!("{tokens:?}")
    }

    fn stream(&self) -> Box<dyn TextStream + '_> {
        unimplemented!("no text is generated")
    }

    fn eos(&self) -> u32 {
        self.vocab_size as u32 - 1
    }

    fn bos(&self) -> Option<u32> {
        None
    }

    fn pad(&self) -> Option<u32> {
        None
    }

    fn hash(&self) -> u64 {
        1
    }
}

/// Writes documents, each a list of sequences of tokens, as the data set `out` of a folder.
fn write(
    dir: &TempDir,
    out: &str,
    documents: &[Vec<Vec<u32>>],
    vocab_size: usize,
) -> IndexedDataset {
    let line = |document: &Vec<Vec<u32>>| {
        let text = |tokens: &Vec<u32>| {
            let words: Vec<String> = tokens.iter().map(u32::to_string).collect();
            words.join(" ")
        };
        let texts: Vec<String> = document.iter().map(text).collect();
        format!("{}\n", serde_json::json!({ "text": texts }))
    };
    let lines: String = documents.iter().map(line).collect();
    let input = dir.path().join(format!("{out}.jsonl"));
    fs::write(&input, lines).unwrap();
    let prefix = dir.path().join(out);
    let config = PreprocessConfig::new(vec![input], prefix.clone());
    config.run(&Numbers { vocab_size }, |_| ()).unwrap();
    IndexedDataset::open(prefix).unwrap()
}

fn documents(set: &IndexedDataset) -> Vec<Vec<Vec<u32>>> {
    let document = |index| {
        let sequences = set.document(index).unwrap().into_iter();
        let unsigned = |tokens: Vec<i64>| tokens.into_iter().map(|token| token as u32).collect();
        sequences.map(unsigned).collect()
    };
    (0..set.num_documents()).map(document).collect()
}

#[test]
fn the_data_set_of_megatron_core_is_made_again() {
    let dir = tempfile::tempdir().unwrap();
    let text = fs::read_to_string(fixture("megatron-dataset/corpus.jsonl")).unwrap();
    let tokens = text.lines().map(|line| {
        let value: serde_json::Value = serde_json::from_str(line).unwrap();
        let tokens = value["tokens"].as_array().unwrap().iter();
        vec![tokens.map(|token| token.as_u64().unwrap() as u32).collect()]
    });
    let tokens: Vec<Vec<Vec<u32>>> = tokens.collect();
    write(&dir, "made", &tokens, 256);
    let theirs = fixture("megatron-dataset/data_document");
    assert!(bytes(&dir.path().join("made")) == bytes(&theirs));

    let set = IndexedDataset::open(theirs).unwrap();
    set.check().unwrap();
    assert_eq!(documents(&set), tokens);
    assert_eq!(set.num_documents(), 200);
    assert!(set.description().is_none(), "megaburn did not write it");
    let sizes: Vec<u64> = set
        .document_sizes()
        .map(|size| size.unwrap().num_tokens)
        .collect();
    let expected: Vec<u64> = tokens
        .iter()
        .map(|document| document[0].len() as u64)
        .collect();
    assert_eq!(sizes, expected);
}

#[rstest]
fn megatrons_script_and_megaburn_write_the_same_bytes(
    #[values("byte-level", "llama3", "llama2", "unigram")] tokenizer: &str,
    #[values(1, 3)] workers: usize,
) {
    let dir = tempfile::tempdir().unwrap();
    let opened = HfTokenizer::open(fixture(&format!("tokenizers/{tokenizer}"))).unwrap();
    let corpus = fixture("megatron-preprocess/corpus.jsonl");
    let keys = ["text", "title", "parts"];
    let config = PreprocessConfig::new(vec![corpus.clone()], dir.path().join(tokenizer))
        .with_json_keys(keys.map(String::from).into())
        .with_append_eod(true)
        .with_num_workers(workers);
    let summary = config.run(&opened, |_| ()).unwrap();
    assert_eq!(summary.counts.documents, 60);
    let plain = dir.path().join(format!("{tokenizer}-plain_text_document"));
    PreprocessConfig::new(vec![corpus], plain)
        .run(&opened, |_| ())
        .unwrap();
    let mut compared = 0;
    for name in keys.map(|key| format!("{tokenizer}_{key}_document")) {
        let theirs = fixture(&format!("megatron-preprocess/{name}"));
        assert!(bytes(&dir.path().join(&name)) == bytes(&theirs), "{name}");
        compared += 1;
    }
    let name = format!("{tokenizer}-plain_text_document");
    let theirs = fixture(&format!("megatron-preprocess/{name}"));
    assert!(bytes(&dir.path().join(&name)) == bytes(&theirs), "{name}");
    assert_eq!(compared, 3);
}

fn any_documents(vocab_size: u32) -> impl Strategy<Value = Vec<Vec<Vec<u32>>>> {
    let sequence = proptest::collection::vec(0..vocab_size, 1..20);
    let document = proptest::collection::vec(sequence, 0..4);
    proptest::collection::vec(document, 0..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn what_is_written_is_read_merged_and_split_without_loss(
        vocab_size in prop_oneof![Just(300u32), Just(65_499), Just(65_500), Just(200_000)],
        one in any_documents(300),
        other in any_documents(300),
        weights in proptest::collection::vec(1.0f64..10.0, 1..4),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let sets = [&one, &other].map(|documents| (documents, vocab_size as usize));
        let sets: Vec<_> = ["one", "other"].into_iter().zip(sets).map(|(name, (documents, vocab))| {
            write(&dir, name, documents, vocab)
        }).collect();
        let expected = if vocab_size < 65_500 { TokenType::U16 } else { TokenType::I32 };
        prop_assert_eq!(sets[0].token_type(), expected);
        prop_assert_eq!(&documents(&sets[0]), &one);

        let all = dir.path().join("all");
        merge(&sets, &all, false).unwrap();
        let all = IndexedDataset::open(all).unwrap();
        all.check().unwrap();
        let joined = [one, other].concat();
        prop_assert_eq!(&documents(&all), &joined);

        if let Ok(parts) = DocumentSplit::new(&weights, all.num_documents()) {
            let prefixes = match split(&all, &parts, &dir.path().join("part"), false) {
                Err(DataError::EmptyPart { .. }) => return Ok(()),
                prefixes => prefixes.unwrap(),
            };
            let parts: Vec<_> = prefixes.iter().map(|p| IndexedDataset::open(p).unwrap()).collect();
            parts.iter().try_for_each(IndexedDataset::check).unwrap();
            let read: Vec<_> = parts.iter().flat_map(documents).collect();
            prop_assert_eq!(read, joined);
            let again = dir.path().join("again");
            merge(&parts, &again, false).unwrap();
            prop_assert!(bytes(&again) == bytes(all.prefix()));
        }
        prop_assert!(!dir.path().join("all.megaburn-part").exists());
    }
}

/// A data set of three documents in a folder of its own.
fn example() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let document = |length: u32| vec![(0..length).collect::<Vec<u32>>()];
    let set = write(&dir, "set", &[document(5), vec![], document(3)], 300);
    let prefix = set.prefix().to_path_buf();
    (dir, prefix)
}

fn refusal(prefix: &Path) -> String {
    let opened = IndexedDataset::open(prefix).and_then(|set| set.check());
    opened.unwrap_err().to_string()
}

#[test]
fn every_truncated_or_foreign_file_is_refused() {
    let (_dir, prefix) = example();
    let [bin, idx] = bytes(&prefix);
    let path = |ending: &str| prefix.with_extension(ending);
    for cut in 0..bin.len() {
        fs::write(path("bin"), &bin[..cut]).unwrap();
        assert!(refusal(&prefix).contains("it was cut, or the index is that of another file"));
    }
    fs::write(path("bin"), &bin).unwrap();
    for cut in 0..idx.len() {
        fs::write(path("idx"), &idx[..cut]).unwrap();
        assert!(
            refusal(&prefix).contains("is not an index of Megatron-LM"),
            "{cut}"
        );
    }
    fs::write(path("idx"), &idx).unwrap();
    let (_other, other) = example();
    fs::write(
        path("bin"),
        fs::read(fixture("megatron-dataset/data_document.bin")).unwrap(),
    )
    .unwrap();
    assert!(refusal(&prefix).contains("the index is that of another file"));
    IndexedDataset::open(other).unwrap().check().unwrap();
    fs::remove_file(path("bin")).unwrap();
    assert!(refusal(&prefix).contains("set.bin` does not exist"));
}

#[test]
fn every_changed_byte_of_an_index_is_an_error_or_harmless_but_never_a_panic() {
    let (_dir, prefix) = example();
    let [_, idx] = bytes(&prefix);
    let path = prefix.with_extension("idx");
    let mut refused = 0;
    for at in 0..idx.len() {
        for value in [0, 1, 0x7F, 0xFF] {
            let mut changed = idx.clone();
            changed[at] = value;
            fs::write(&path, &changed).unwrap();
            let Ok(set) = IndexedDataset::open(&prefix) else {
                refused += 1;
                continue;
            };
            refused += u32::from(set.check().is_err() && changed != idx);
            for index in 0..set.num_documents().min(5) {
                let _ = set.document(index);
            }
            let _: Vec<_> = set.document_sizes().take(5).collect();
        }
    }
    assert!(refused > 200, "only {refused} were refused");
}

#[rstest]
#[case(17, 6, "code 6 is not a type of tokens")]
#[case(9, 2, "its version is 2, not 1")]
#[case(0, 0, "it does not begin with MMIDIDX")]
#[case(
    34,
    9,
    "sequence 1 has length 3 and begins at byte 10, but the one before it ends at byte 18"
)]
fn what_is_wrong_with_an_index_is_said(#[case] at: usize, #[case] value: u8, #[case] why: &str) {
    let (_dir, prefix) = example();
    let mut idx = bytes(&prefix)[1].clone();
    idx[at] = value;
    fs::write(prefix.with_extension("idx"), &idx).unwrap();
    assert!(refusal(&prefix).contains(why), "{}", refusal(&prefix));
}

#[test]
fn data_of_several_modes_is_refused() {
    let (_dir, prefix) = example();
    let mut idx = bytes(&prefix)[1].clone();
    idx.extend([0, 0]);
    fs::write(prefix.with_extension("idx"), &idx).unwrap();
    assert!(refusal(&prefix).contains("modes of sequences"));
}

#[test]
fn data_sets_of_different_types_are_not_merged() {
    let dir = tempfile::tempdir().unwrap();
    let sets = [
        write(&dir, "small", &[vec![vec![1]]], 300),
        write(&dir, "large", &[vec![vec![1]]], 100_000),
    ];
    let refusal = merge(&sets, &dir.path().join("out"), false)
        .unwrap_err()
        .to_string();
    assert!(refusal.contains("of type uint16, but"), "{refusal}");
    assert!(!dir.path().join("out.bin").exists());
}

#[test]
fn data_sets_of_different_tokenizers_are_not_merged() {
    let dir = tempfile::tempdir().unwrap();
    let sets = [
        write(&dir, "one", &[vec![vec![1]]], 300),
        write(&dir, "other", &[vec![vec![1]]], 301),
    ];
    let refusal = merge(&sets, &dir.path().join("out"), false).unwrap_err();
    let refusal = refusal.to_string();
    assert!(refusal.contains("with different tokenizers"), "{refusal}");
    // A data set of another program names no tokenizer, and may be joined.
    fs::remove_file(dir.path().join("other.megaburn")).unwrap();
    merge(&sets, &dir.path().join("out"), false).unwrap();
    let out = IndexedDataset::open(dir.path().join("out")).unwrap();
    assert!(out.description().unwrap()["tokenizer"].is_null());
}

#[test]
fn a_data_set_may_replace_one_it_was_merged_from() {
    let dir = tempfile::tempdir().unwrap();
    let one = write(&dir, "one", &[vec![vec![1, 2]]], 300);
    let two = write(&dir, "two", &[vec![vec![3]]], 300);
    let out = one.prefix().to_path_buf();
    let sets = [one, two];
    assert!(
        merge(&sets, &out, false)
            .unwrap_err()
            .to_string()
            .contains("exists")
    );
    merge(&sets, &out, true).unwrap();
    let merged = IndexedDataset::open(out).unwrap();
    assert_eq!(documents(&merged), [[[1, 2].to_vec()], [[3].to_vec()]]);
    assert_eq!(merged.description().unwrap()["command"], "merge");
    let refusal = merged.document(2).unwrap_err().to_string();
    assert!(refusal.contains("has 2 documents"), "{refusal}");
}
