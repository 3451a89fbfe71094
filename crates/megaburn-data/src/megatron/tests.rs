//! Indices that are built once, also after kills, by several threads, and over damaged files.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;

use rstest::rstest;
use tempfile::TempDir;

use super::*;
use crate::{
    error::DataError, index_cache::IndexEvent, indexed::IndexedDataset, part::fuse,
    preprocess::PreprocessConfig, samples::Samples, tokenizer::ByteTokenizer,
};

/// A data set of random lines.
fn data_set(dir: &Path, name: &str, num_documents: usize) -> Arc<IndexedDataset> {
    let line = |_| {
        let text: String = (0..fastrand::usize(0..30))
            .map(|_| fastrand::alphanumeric())
            .collect();
        format!("{}\n", serde_json::json!({"text": text}))
    };
    let input = dir.join(format!("{name}.jsonl"));
    fs::write(&input, (0..num_documents).map(line).collect::<String>()).unwrap();
    let config = PreprocessConfig::new(vec![input], dir.join(name)).with_append_eod(true);
    config.with_force(true).run(&ByteTokenizer, |_| ()).unwrap();
    Arc::new(IndexedDataset::open(dir.join(name)).unwrap())
}

fn all(samples: &dyn Samples) -> Vec<Vec<u32>> {
    let tokens = |index| samples.tokens(index).unwrap();
    (0..samples.num_samples()).map(tokens).collect()
}

/// The contents of the files of a folder, by name.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let Ok(entries) = fs::read_dir(folder) else {
        return BTreeMap::new();
    };
    let file = |path: PathBuf| (path.clone(), fs::read(path).unwrap());
    entries.map(|entry| file(entry.unwrap().path())).collect()
}

struct Case {
    _dir: TempDir,
    cache: PathBuf,
    sources: Vec<SequenceRange>,
    blend: BlendedDatasetConfig,
}

impl Case {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let source = |(name, size)| SequenceRange::all(data_set(dir.path(), name, size));
        let sources = [("one", 11), ("two", 20)].map(source).to_vec();
        let cache = dir.path().join("cache").join("indices");
        let gpt = GptDatasetConfig::new(9, 260, &cache).with_num_samples(30);
        Self {
            sources,
            cache,
            blend: BlendedDatasetConfig::new(gpt).with_weights(vec![2.0, 1.0]),
            _dir: dir,
        }
    }

    fn build(&self) -> Result<(BlendedDataset, Vec<IndexEvent>), DataError> {
        let mut events = Vec::new();
        let built = self
            .blend
            .build(&self.sources, |event| events.push(event))?;
        Ok((built, events))
    }
}

#[test]
fn an_index_is_built_once() {
    let case = Case::new();
    let (first, events) = case.build().unwrap();
    let is_building = |event: &IndexEvent| matches!(event, IndexEvent::Building { .. });
    assert_eq!(events.len(), 3, "{events:?}");
    assert!(events.iter().all(is_building), "{events:?}");
    let written = files(&case.cache);
    assert_eq!(written.len(), 4 + 4 + 3);
    let (second, events) = case.build().unwrap();
    assert_eq!(events, []);
    assert_eq!(all(&second), all(&first));
    assert_eq!(files(&case.cache), written);
}

#[test]
fn another_length_of_the_same_epochs_needs_no_other_index() {
    let dir = tempfile::tempdir().unwrap();
    let source = SequenceRange::all(data_set(dir.path(), "set", 50));
    let config = GptDatasetConfig::new(8, 260, dir.path().join("cache"));
    let mut num_built = 0;
    let mut build = |config: &GptDatasetConfig| {
        config
            .build(&source, |_| num_built += 1)
            .unwrap()
            .num_samples()
    };
    let epoch = build(&config);
    assert_eq!(build(&config.clone().with_num_samples(epoch / 2)), epoch);
    assert!(build(&config.clone().with_num_samples(epoch + 1)) > epoch);
    assert!(build(&config.clone().with_seed(5)) == epoch);
    assert_eq!(num_built, 3);
}

#[test]
fn a_killed_build_leaves_what_the_next_one_removes() {
    let mut case = Case::new();
    case.sources.truncate(1);
    case.blend = case.blend.with_weights(vec![1.0]);
    case.build().unwrap();
    let expected = files(&case.cache);
    let mut interrupted = 0;
    for operations in 0..100 {
        fs::remove_dir_all(&case.cache).unwrap_or_default();
        fuse::allow(&case.cache, operations);
        let killed = case.build();
        fuse::remove(&case.cache);
        if killed.is_ok() {
            break;
        }
        interrupted += 1;
        case.build().unwrap();
        assert_eq!(files(&case.cache), expected, "{operations}");
    }
    assert!(interrupted > 20, "only {interrupted} interruptions");
}

#[test]
fn what_others_left_is_removed_and_foreign_files_stay() {
    let case = Case::new();
    fs::create_dir_all(&case.cache).unwrap();
    let key = "0123456789abcdef0123456789abcdef";
    let left = case
        .cache
        .join(format!("{key}-sample_index.npy.unfinished-4"));
    let mine = case.cache.join("notes.txt");
    fs::write(&left, "half").unwrap();
    fs::write(&mine, "mine").unwrap();
    case.build().unwrap();
    assert!(!left.exists());
    assert_eq!(fs::read(&mine).unwrap(), b"mine");
}

#[test]
fn threads_that_start_at_once_build_once() {
    let case = Case::new();
    let events = Mutex::new(Vec::new());
    let built: Vec<_> = thread::scope(|scope| {
        let build = || {
            let report = |event| events.lock().unwrap().push(event);
            all(&case.blend.build(&case.sources, report).unwrap())
        };
        let threads: Vec<_> = (0..6).map(|_| scope.spawn(build)).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    assert!(built.iter().all(|tokens| *tokens == built[0]));
    let events = events.into_inner().unwrap();
    let is_building = |event: &&IndexEvent| matches!(event, IndexEvent::Building { .. });
    assert_eq!(events.iter().filter(is_building).count(), 3, "{events:?}");
    assert_eq!(files(&case.cache).len(), 4 + 4 + 3);
}

#[test]
fn a_damaged_file_is_built_again_and_reported() {
    let case = Case::new();
    let (expected, _) = case.build().unwrap();
    let (expected, written) = (all(&expected), files(&case.cache));
    for (path, bytes) in &written {
        let cut = bytes[..fastrand::usize(..bytes.len())].to_vec();
        let foreign = b"\x93NUMPY\x01\x00 of another program".repeat(90);
        let longer = [&bytes[..], b"0"].concat();
        for damaged in [cut, foreign, longer] {
            fs::write(path, damaged).unwrap();
            let (found, events) = case.build().unwrap();
            assert!(all(&found) == expected, "{}", path.display());
            let [
                IndexEvent::Damaged { path: named, .. },
                IndexEvent::Building { .. },
            ] = events.as_slice()
            else {
                panic!("{}: {events:?}", path.display());
            };
            assert_eq!(named, path);
            assert_eq!(files(&case.cache), written);
        }
        fs::remove_file(path).unwrap();
        assert!(case.build().unwrap().1.len() == 1);
        assert_eq!(files(&case.cache), written);
    }
}

#[test]
fn numbers_that_cannot_be_are_errors() {
    let case = Case::new();
    let (expected, _) = case.build().unwrap();
    let expected = all(&expected);
    let (mut num_errors, mut num_arrays) = (0, 0);
    for (path, bytes) in files(&case.cache) {
        if path.extension().is_none_or(|ending| ending != "npy") {
            continue;
        }
        num_arrays += 1;
        for value in [0xff, 0x7f, 3] {
            // The header has 128 bytes.
            let mut damaged = bytes.clone();
            damaged[128..].fill(value);
            fs::write(&path, &damaged).unwrap();
            let (found, events) = case.build().unwrap();
            assert_eq!(events, [], "its header and size are right");
            for (index, expected) in expected.iter().enumerate() {
                match found.tokens(index as u64) {
                    Ok(tokens) => assert_eq!(tokens.len(), expected.len()),
                    Err(error) => {
                        let error = error.to_string();
                        assert!(error.contains("is damaged: "), "{error}");
                        assert!(error.contains("_index.npy"), "{error}");
                        num_errors += 1;
                    }
                }
            }
        }
        fs::write(&path, bytes).unwrap();
    }
    assert_eq!(num_arrays, 3 + 3 + 2);
    assert!(num_errors > 30 * num_arrays, "only {num_errors} errors");
}

#[test]
fn a_data_set_that_is_written_again_has_another_order() {
    let dir = tempfile::tempdir().unwrap();
    let config = GptDatasetConfig::new(8, 260, dir.path().join("cache"));
    let mut first = None;
    for _ in 0..2 {
        let source = SequenceRange::all(data_set(dir.path(), "set", 50));
        let mut num_built = 0;
        let built = config.build(&source, |_| num_built += 1).unwrap();
        assert_eq!(num_built, 1);
        let found = all(&built);
        assert_ne!(first.replace(found.clone()), Some(found));
    }
}

#[test]
fn the_folder_cannot_be_a_file() {
    let case = Case::new();
    let file = case.cache.parent().unwrap();
    fs::write(file, "a file").unwrap();
    let error = case.build().unwrap_err().to_string();
    assert!(error.contains("in the cache cannot be written"), "{error}");
    assert!(error.contains("set data.cache_dir"), "{error}");
    assert_eq!(fs::read(file).unwrap(), b"a file");
}

#[rstest]
#[case(&[1.0], None, "weights need a number of samples")]
#[case(&[1.0, 2.0], Some(9), "there are 2 weights for 1 data sets")]
#[case(&[0.0], Some(9), "0 is not a positive weight")]
#[case(&[f64::NAN], Some(9), "NaN is not a positive weight")]
#[case(&[1.0], Some(0), "the number of samples is 0")]
#[case(&[1.0], Some(u64::MAX), "more than 2147483647 epochs")]
fn blends_that_cannot_be_are_refused(
    #[case] weights: &[f64],
    #[case] num_samples: Option<u64>,
    #[case] why: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let source = SequenceRange::all(data_set(dir.path(), "set", 9));
    let gpt = GptDatasetConfig::new(4, 260, dir.path().join("cache")).with_samples_of(num_samples);
    let blend = BlendedDatasetConfig::new(gpt).with_weights(weights.to_vec());
    let error = blend.build(&[source], |_| ()).unwrap_err().to_string();
    assert!(error.contains(why), "{error}");
    let blend = blend.build(&[], |_| ()).unwrap_err().to_string();
    assert!(blend.contains("cannot be blended: there are 0"), "{blend}");
}

#[test]
fn a_blend_that_needs_more_than_was_made_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let [one, two] = ["one", "two"].map(|name| SequenceRange::all(data_set(dir.path(), name, 30)));
    let cache = dir.path().join("cache");
    let seq_len = one.num_tokens().unwrap() as usize - 1;
    let gpt = GptDatasetConfig::new(seq_len, 260, &cache).with_num_samples(1);
    let blend = BlendedDatasetConfig::new(gpt).with_weights(vec![1.0, 1e-9, 1e-9]);
    // Rounded up, each contributes one of three samples, but the first and the third are of the
    // heaviest one.
    let sources = [one, two.clone(), two];
    let exact = blend.clone().with_surplus(0.0);
    let error = exact.build(&sources, |_| ()).unwrap_err().to_string();
    assert!(error.contains("needs more samples of"), "{error}");
    assert!(
        error.contains(
            "than the 1 that were made with the surplus 0; change its weight (data.train)"
        ),
        "{error}"
    );
    assert_eq!(files(&cache).len(), 2 * 4, "those of the two data sets");
    let built = blend.build(&sources, |_| ()).unwrap();
    let positions = [0, 1, 2].map(|index| built.position(index).unwrap());
    assert_eq!(positions, [(0, 0), (1, 0), (0, 1)]);
}

#[rstest]
#[case(GptDatasetConfig::new(0, 260, "none"), "the sequence length is 0")]
#[case(
    GptDatasetConfig::new(usize::MAX, 260, "none"),
    "sequence length 18446744073709551615 (data.seq_len) is not below"
)]
#[case(GptDatasetConfig::new(9, 260, "none").with_seed(1 << 32), "the seed 4294967296 is above")]
#[case(
    GptDatasetConfig::new(900, 260, "none"),
    "but one sample of sequence length 900 needs 901"
)]
fn settings_that_cannot_be_are_refused(#[case] config: GptDatasetConfig, #[case] why: &str) {
    let dir = tempfile::tempdir().unwrap();
    let source = SequenceRange::all(data_set(dir.path(), "set", 9));
    let error = config.build(&source, |_| ()).unwrap_err().to_string();
    assert!(error.contains(why), "{error}");
    assert!(!Path::new("none").exists());
}

#[test]
fn a_token_outside_the_vocabulary_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let source = SequenceRange::all(data_set(dir.path(), "set", 9));
    let config = GptDatasetConfig::new(3, 257, dir.path().join("cache"));
    let built = config.build(&source, |_| ()).unwrap();
    let found: Vec<_> = (0..built.num_samples())
        .map(|index| built.tokens(index))
        .collect();
    let error = found.into_iter().find_map(Result::err).unwrap().to_string();
    let place = error.split_once(": token 257 at position ").unwrap().1;
    let position: usize = place.split_once(' ').unwrap().0.parse().unwrap();
    let tokens = fs::read(dir.path().join("set.bin")).unwrap();
    assert_eq!(tokens[2 * position..][..2], [1, 1], "{error}");
}

#[test]
fn a_part_without_sequences_names_the_data_set() {
    let dir = tempfile::tempdir().unwrap();
    let set = data_set(dir.path(), "set", 9);
    let error = SequenceRange::split(&set, &[99.0, 1.0])
        .unwrap_err()
        .to_string();
    // A document without tokens has no sequence.
    let num_sequences = set.num_sequences();
    let why = format!("valid would have none of the {num_sequences} sequences of `");
    assert!(error.contains(&why), "{error}");
}
