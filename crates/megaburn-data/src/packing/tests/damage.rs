//! Packings that are built once, also after kills, by several threads, and over damaged files.

use std::fs;
use std::sync::Mutex;
use std::thread;

use rstest::rstest;

use super::{VOCAB, case, files, samples, write};
use crate::{
    dataset::TokenDataset, error::DataError, index_cache::IndexEvent, packing::PackedSamplerConfig,
    part::fuse, samples::Samples,
};

#[test]
fn a_packing_is_built_once_also_by_threads_that_start_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let (set, config, cache) = case(dir.path());
    let expected = samples(&config.init(&set, |_| ()).unwrap());
    let written = files(&cache);
    assert_eq!(written.len(), 5);
    fs::remove_dir_all(&cache).unwrap();
    let events = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                let report = |event| events.lock().unwrap().push(event);
                assert_eq!(samples(&config.init(&set, report).unwrap()), expected);
            });
        }
    });
    let events = events.into_inner().unwrap();
    let is_packing = |event: &&IndexEvent| matches!(event, IndexEvent::Packing { .. });
    assert_eq!(events.iter().filter(is_packing).count(), 1, "{events:?}");
    assert_eq!(files(&cache), written);
    // Another multiple or another part of the data is another packing.
    config.clone().with_multiple(8).init(&set, |_| ()).unwrap();
    config.init(&set.split(0.5).unwrap().train, |_| ()).unwrap();
    assert_eq!(files(&cache).len(), 3 * 5);
}

#[test]
fn what_a_killed_build_leaves_is_built_again() {
    let dir = tempfile::tempdir().unwrap();
    let (set, config, cache) = case(dir.path());
    config.init(&set, |_| ()).unwrap();
    let expected = files(&cache);
    let mut interrupted = 0;
    for operations in 0..100 {
        fs::remove_dir_all(&cache).unwrap_or_default();
        fuse::allow(&cache, operations);
        let killed = config.init(&set, |_| ());
        fuse::remove(&cache);
        if killed.is_ok() {
            break;
        }
        interrupted += 1;
        config.init(&set, |_| ()).unwrap();
        assert_eq!(files(&cache), expected, "{operations}");
    }
    assert!(interrupted > 15, "only {interrupted} interruptions");
}

#[test]
fn a_damaged_file_is_built_again_and_reported() {
    let dir = tempfile::tempdir().unwrap();
    let (set, config, cache) = case(dir.path());
    let expected = samples(&config.init(&set, |_| ()).unwrap());
    let written = files(&cache);
    for (path, bytes) in &written {
        let cut = bytes[..fastrand::usize(..bytes.len())].to_vec();
        let shorter = bytes[..bytes.len() - 8].to_vec();
        let longer = [&bytes[..], &[0; 8]].concat();
        for damaged in [cut, shorter, longer, b"other".repeat(90)] {
            fs::write(path, damaged).unwrap();
            let mut events = Vec::new();
            let found = config.init(&set, |event| events.push(event)).unwrap();
            assert!(samples(&found) == expected, "{}", path.display());
            let [
                IndexEvent::Damaged { path: named, .. },
                IndexEvent::Packing { .. },
            ] = events.as_slice()
            else {
                panic!("{}: {events:?}", path.display());
            };
            assert_eq!(named, path);
            assert_eq!(files(&cache), written);
        }
        fs::remove_file(path).unwrap();
        config.init(&set, |_| ()).unwrap();
        assert_eq!(files(&cache), written);
    }
}

#[rstest]
fn numbers_that_cannot_be_are_errors(#[values(0xff, 0x7f, 0)] value: u8) {
    let dir = tempfile::tempdir().unwrap();
    let (set, config, cache) = case(dir.path());
    config.init(&set, |_| ()).unwrap();
    for (path, bytes) in files(&cache) {
        if path.extension().is_none_or(|ending| ending != "npy") {
            continue;
        }
        // The header has 128 bytes.
        let mut damaged = bytes.clone();
        damaged[128..].fill(value);
        fs::write(&path, &damaged).unwrap();
        let found = config.init(&set, |event| panic!("{event:?}"));
        let found = found.and_then(|found| found.batch(0..found.num_samples()));
        // Zeros are first tokens of the data set.
        if value != 0 || !path.to_string_lossy().contains("first_token") {
            let error = found.unwrap_err().to_string();
            assert!(error.contains("is damaged: "), "{error}");
            assert!(error.contains(".npy"), "{error}");
        }
        fs::write(&path, bytes).unwrap();
    }
}

#[rstest]
#[case(0, 1, "the sequence length is 0")]
#[case(16, 0, "the multiple of positions of a document is 0")]
#[case(
    40,
    16,
    "multiples of 16 positions cannot fill sequences of 40; use a sequence length of 48"
)]
#[case(
    usize::MAX,
    1,
    "the sequence length 18446744073709551615 is above 4294967295"
)]
#[case(
    16,
    16,
    "part of t has no document of two tokens or more, but 1 shorter ones"
)]
fn what_cannot_be_packed_is_one_error(
    #[case] seq_len: usize,
    #[case] multiple: usize,
    #[case] why: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let config = PackedSamplerConfig::new(seq_len).with_multiple(multiple);
    let set = TokenDataset::from_tokens("t", &[1, 2, 3], VOCAB).unwrap();
    let error = config.init(&set.part("", 1..2), |_| ()).unwrap_err();
    assert!(error.to_string().contains(why), "{error}");
    let (set, _) = write(dir.path(), "set", &vec![vec!["a".into()]; 9], false);
    let set = TokenDataset::indexed(set, VOCAB);
    let cache = dir.path().join("cache");
    let error = config.with_cache(&cache).init(&set, |_| ()).unwrap_err();
    let is_empty = matches!(
        error,
        DataError::NothingToPack {
            num_documents: 9,
            ..
        }
    );
    assert_eq!(is_empty, why.contains("no document"), "{error}");
    assert!(
        files(&cache).is_empty(),
        "nothing is left of a packing that failed"
    );
}
