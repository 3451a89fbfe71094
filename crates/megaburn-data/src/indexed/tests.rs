//! Data sets that are merged and divided, with interruptions and earlier data sets in the way.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tempfile::TempDir;

use super::*;
use crate::{
    dataset::TokenDataset, part::fuse, preprocess::PreprocessConfig, tokenizer::ByteTokenizer,
};

/// Writes texts as the data set `name` of a folder.
fn write(dir: &Path, name: &str, texts: &[&str]) -> PathBuf {
    let line = |text: &&str| format!("{}\n", serde_json::json!({"text": text}));
    let input = dir.join(format!("{name}.jsonl"));
    fs::write(&input, texts.iter().map(line).collect::<String>()).unwrap();
    let config = PreprocessConfig::new(vec![input], dir.join(name)).with_force(true);
    config.run(&ByteTokenizer, |_| ()).unwrap();
    dir.join(name)
}

fn texts(prefix: &Path) -> Vec<String> {
    let set = IndexedDataset::open(prefix).unwrap();
    let text = |index| {
        let tokens = set.document(index).unwrap().concat();
        let bytes = tokens.into_iter().map(|token| token as u8);
        String::from_utf8(bytes.collect()).unwrap()
    };
    (0..set.num_documents()).map(text).collect()
}

fn divide(prefix: &Path, weights: &[f64], force: bool) -> Result<Vec<PathBuf>, String> {
    let set = IndexedDataset::open(prefix).unwrap();
    let divide = || {
        let parts = DocumentSplit::new(weights, set.num_documents())?;
        split(&set, &parts, &with_ending(prefix, "-q"), force)
    };
    divide().map_err(|error| error.to_string())
}

fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn a_part_of_an_earlier_split_does_not_stay() {
    let dir = folder();
    let set = write(dir.path(), "set", &["a", "b", "c"]);
    divide(&set, &[1.0, 1.0, 1.0], false).unwrap();
    let test = with_ending(&set, "-q_test");
    assert_eq!(texts(&test), ["c"]);
    for name in ["-q_train", "-q_valid"] {
        for ending in [".bin", ".idx", ".megaburn"] {
            fs::remove_file(with_ending(&set, &format!("{name}{ending}"))).unwrap();
        }
    }
    let refusal = divide(&set, &[1.0, 2.0], false).unwrap_err();
    assert!(refusal.contains("-q_test.bin` exists"), "{refusal}");
    assert_eq!(divide(&set, &[1.0, 2.0], true).unwrap().len(), 2);
    assert_eq!(texts(&with_ending(&set, "-q_valid")), ["b", "c"]);
    for ending in [".bin", ".idx", ".megaburn"] {
        assert!(!with_ending(&test, ending).exists(), "{ending}");
    }

    // A data set of another program is not removed.
    fs::write(with_ending(&test, ".bin"), "mine").unwrap();
    let refusal = divide(&set, &[1.0, 2.0], true).unwrap_err();
    assert!(
        refusal.contains("-q_test.bin` is not overwritten"),
        "{refusal}"
    );
    assert_eq!(fs::read(with_ending(&test, ".bin")).unwrap(), b"mine");
}

#[test]
fn a_part_without_tokens_is_refused() {
    let dir = folder();
    let set = write(dir.path(), "set", &["abc", ""]);
    let refusal = divide(&set, &[1.0, 1.0], false).unwrap_err();
    assert!(
        refusal.contains("the part valid would have only documents 1..2, which have no tokens"),
        "{refusal}"
    );
    assert!(!dir.path().join("set-q.megaburn-part").exists());
}

#[test]
fn a_source_that_is_written_again_is_not_committed_with_its_old_tokens() {
    let mut interrupted = 0;
    for operations in 0..60 {
        let dir = folder();
        let one = write(dir.path(), "one", &["old", "x"]);
        let (all, part) = (dir.path().join("all"), with_ending(&one, "-q_train"));
        let both = |force| {
            let set = IndexedDataset::open(&one).unwrap();
            let parts = DocumentSplit::new(&[1.0], 2).unwrap();
            let merged = merge(&[IndexedDataset::open(&one).unwrap()], &all, force);
            merged.and(split(&set, &parts, &with_ending(&one, "-q"), force))
        };
        fuse::allow(dir.path(), operations);
        let found = both(false);
        fuse::remove(dir.path());
        if found.is_ok() {
            break;
        }
        interrupted += 1;
        write(dir.path(), "one", &["new", "x"]);
        // What was complete before the interruption is not looked at again without force.
        let is_left = |prefix: &PathBuf| with_ending(prefix, ".megaburn-part").exists();
        let (merging, splitting) = (is_left(&all), is_left(&with_ending(&one, "-q")));
        let error = both(false).err();
        for (was_left, prefix) in [(merging, &all), (splitting, &part)] {
            if was_left && with_ending(prefix, ".idx").exists() && error.is_none() {
                assert_eq!(texts(prefix), ["new", "x"], "{operations}");
            }
        }
        if let Some(error) = error {
            both(true).unwrap_or_else(|forced| panic!("{operations}: {error}; {forced}"));
        }
        assert_eq!(texts(&all), ["new", "x"], "{operations}");
        assert_eq!(texts(&part), ["new", "x"], "{operations}");
    }
    assert!(interrupted > 30, "only {interrupted} interruptions");
}

#[test]
fn the_tokenizer_is_carried_over() {
    let dir = folder();
    let set = write(dir.path(), "set", &["a", "b"]);
    let tokenizer = |prefix: &Path| {
        let set = IndexedDataset::open(prefix).unwrap();
        set.description().unwrap()["tokenizer"].clone()
    };
    let expected = tokenizer(&set);
    assert_eq!(expected["vocab_size"], 260);
    for part in divide(&set, &[1.0, 1.0], false).unwrap() {
        assert_eq!(tokenizer(&part), expected);
    }
    let all = dir.path().join("all");
    let sets = [&set, &set].map(|prefix| IndexedDataset::open(prefix).unwrap());
    merge(&sets, &all, false).unwrap();
    assert_eq!(tokenizer(&all), expected);
}

#[test]
fn bytes_of_text_are_known_of_what_megaburn_encoded() {
    let dir = folder();
    let one = write(dir.path(), "one", &["größer", "", "b"]);
    let other = write(dir.path(), "other", &["cd"]);
    let bytes_per_token = |prefix: &Path| {
        let set = IndexedDataset::open(prefix).unwrap();
        TokenDataset::indexed(Arc::new(set), 260).bytes_per_token()
    };
    assert_eq!(bytes_per_token(&one), Some(1.0));
    let sets = [&one, &other].map(|prefix| IndexedDataset::open(prefix).unwrap());
    let all = dir.path().join("all");
    merge(&sets, &all, false).unwrap();
    assert_eq!(bytes_per_token(&all), Some(1.0));
    let described = IndexedDataset::open(&all).unwrap().description().unwrap();
    assert_eq!(described["text_bytes"], 8 + 1 + 2);
    for prefix in [&one, &all] {
        fs::remove_file(with_ending(prefix, ".megaburn")).unwrap();
        assert_eq!(bytes_per_token(prefix), None, "another program wrote it");
    }
    let sets = [&one, &other].map(|prefix| IndexedDataset::open(prefix).unwrap());
    let unknown = dir.path().join("unknown");
    merge(&sets, &unknown, false).unwrap();
    assert_eq!(bytes_per_token(&unknown), None);
}

#[test]
fn a_document_that_ends_before_it_begins_is_an_error() {
    let dir = folder();
    let set = write(dir.path(), "set", &["a", "", "b"]);
    let idx = with_ending(&set, ".idx");
    let mut bytes = fs::read(&idx).unwrap();
    let third = bytes.len() - 16;
    bytes[third..third + 8].copy_from_slice(&i64::MIN.to_le_bytes());
    fs::write(&idx, bytes).unwrap();
    let set = IndexedDataset::open(&set).unwrap();
    let refusal = set.document_sizes().find_map(Result::err).unwrap();
    assert!(refusal.to_string().contains("before 1"), "{refusal}");
}

#[cfg(not(feature = "object-store"))]
#[test]
fn a_build_without_object_stores_names_the_feature() {
    for url in ["s3://bucket/web", "https://host/web.bin"] {
        let refusal = IndexedDataset::open(url).unwrap_err().to_string();
        let command = "`cargo build --release -p megaburn --features object-store`";
        assert!(refusal.contains(command), "{refusal}");
    }
}
