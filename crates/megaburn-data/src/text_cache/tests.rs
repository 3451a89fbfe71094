use std::thread::scope;

use rstest::rstest;

use super::*;
use crate::{corpus::Corpus, part::fuse, tokenizer::ByteTokenizer};

fn all(set: &TokenDataset) -> Vec<u32> {
    set.sample(set.num_tokens() as usize - 1, 0).unwrap()
}

#[rstest]
#[case("a.txt", "\u{FEFF}one text\r\nwith lines\n\0 and é\n")]
#[case(
    "b.jsonl",
    "{\"text\": \"ab\"}\n\n{\"text\": \"\"}\n{\"text\": \"c\\r\\nd\"}\n"
)]
#[case("c.json", "[{\"text\": \"ab\"}, {\"text\": \"\"}, {\"text\": \"c\"}]")]
#[case("d.json", "\u{FEFF}{\"text\": \"é\"}\n{\"text\": \"e\u{301}\"}")]
fn a_cached_text_is_that_in_memory(#[case] name: &str, #[case] text: &str) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    fs::write(&path, text).unwrap();
    let corpus = Corpus::from_file(&path).unwrap();
    let in_memory = TokenDataset::new(&corpus, &ByteTokenizer).unwrap();
    let expected = all(&in_memory);
    let cache = TextCache::new(dir.path().join("cache"));
    let mut events = Vec::new();
    let first = cache.open(&path, &ByteTokenizer, |event| events.push(event));
    assert_eq!(all(&first.unwrap()), expected);
    assert!(
        matches!(events[0], TextCacheEvent::Encoding { num_bytes, .. }
        if num_bytes == text.len() as u64)
    );
    let again = cache.open(&path, &ByteTokenizer, |event| panic!("{event:?}"));
    let again = again.unwrap();
    assert_eq!(all(&again), expected);
    assert_eq!(again.name(), path.display().to_string());
    assert_eq!(again.bytes_per_token(), in_memory.bytes_per_token());
    assert_eq!(again.fingerprint().unwrap(), corpus.hash());
    assert_eq!(in_memory.fingerprint().unwrap(), corpus.hash());
}

#[rstest]
#[case::any_text("a.txt", false)]
#[case("a", false)]
#[case("A.TXT", false)]
#[case("a.jsonl", false)]
#[case("a.NDJSON", false)]
#[case("a.json", false)]
#[case("a.txt.gz", true)]
#[case("a.jsonl.GZ", true)]
#[case("a.json.Zst", true)]
#[case("a.gz", true)]
#[case("a.gz.txt", false)]
#[case("a.parquet", true)]
#[case("a.PARQUET", true)]
#[case("gz", false)]
fn large_texts_and_those_that_are_unpacked_need_a_cache(
    #[case] name: &str,
    #[case] is_needed: bool,
) {
    let name = Path::new("folder.gz").join(name);
    let most = TextCache::MAX_BYTES_IN_MEMORY;
    assert_eq!(TextCache::is_needed(&name, 0), is_needed);
    assert_eq!(TextCache::is_needed(&name, most), is_needed);
    assert!(TextCache::is_needed(&name, most + 1));
}

#[test]
fn a_changed_text_is_encoded_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.txt");
    let cache = TextCache::new(dir.path().join("cache"));
    for text in ["first", "the second text"] {
        fs::write(&path, text).unwrap();
        let set = cache.open(&path, &ByteTokenizer, |_| ()).unwrap();
        assert_eq!(all(&set), text.bytes().map(u32::from).collect::<Vec<_>>());
    }
}

#[test]
fn a_text_may_have_any_name() {
    let dir = tempfile::tempdir().unwrap();
    let cache = TextCache::new(dir.path().join("cache"));
    let long = "é".repeat(125);
    for name in [
        long.as_str(),
        "a.bin.txt",
        ".txt",
        "two\nlines",
        "*.idx.text",
    ] {
        let path = dir.path().join(name);
        fs::write(&path, name).unwrap();
        for _ in 0..2 {
            let set = cache.open(&path, &ByteTokenizer, |_| ()).unwrap();
            assert_eq!(set.num_tokens(), name.len() as u64);
        }
    }
}

#[test]
fn a_text_that_is_changed_while_it_is_encoded_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.txt");
    let text = "some text ".repeat(100_000);
    fs::write(&path, &text).unwrap();
    let cache = TextCache::new(dir.path().join("cache"));
    let error = cache.open(&path, &ByteTokenizer, |event| {
        if let TextCacheEvent::Encoding { .. } = event {
            fs::write(&path, text.replace('o', "ö")).unwrap();
        }
    });
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("a.txt` was changed while it was encoded; start again"),
        "{error}"
    );
    let set = cache.open(&path, &ByteTokenizer, |_| ()).unwrap();
    assert_eq!(set.num_tokens(), 1_100_000);
}

#[test]
fn many_processes_encode_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.txt");
    fs::write(&path, "some text ".repeat(20_000)).unwrap();
    let cache = TextCache::new(dir.path().join("cache"));
    let counts = scope(|scope| {
        let open = || {
            let (mut num_bytes, mut num_told) = (0, 0);
            let set = cache.open(&path, &ByteTokenizer, |event| match event {
                TextCacheEvent::Encoded(more) => num_bytes += more,
                TextCacheEvent::Encoding { .. } => num_told += 1,
                TextCacheEvent::Waiting => {}
            });
            assert_eq!(set.unwrap().num_tokens(), 200_000);
            (num_bytes, num_told)
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(open)).collect();
        let counts = threads.into_iter().map(|thread| thread.join().unwrap());
        counts.collect::<Vec<(u64, usize)>>()
    });
    assert_eq!(
        counts.iter().map(|(bytes, _)| bytes).sum::<u64>(),
        200_000,
        "{counts:?}"
    );
    assert_eq!(
        counts.iter().map(|(_, told)| told).sum::<usize>(),
        1,
        "{counts:?}"
    );
}

#[rstest]
#[case("a.txt", "", "is empty; give a text")]
#[case("a.jsonl", "{\"text\": \"a\"}\n{\"txt\": \"b\"}\n", "line 2")]
#[case("a.jsonl", "\n\n", "is empty; give a text")]
fn a_text_that_cannot_be_used_is_named(
    #[case] name: &str,
    #[case] text: &str,
    #[case] message: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    fs::write(&path, text).unwrap();
    let cache = TextCache::new(dir.path().join("cache"));
    for _ in 0..2 {
        let error = cache.open(&path, &ByteTokenizer, |_| ()).unwrap_err();
        let error = error.to_string();
        assert!(error.contains(message) && error.contains(name), "{error}");
        assert!(!error.contains("--"), "a run has no such flag: {error}");
    }
}

/// A cached text, one of whose files is damaged, or something that is in its way.
#[rstest]
#[case::cut_tokens(".bin", Some("cu"), "it has 2 bytes, and its index ends at 8")]
#[case::no_tokens(".bin", None, ".bin`: it does not exist")]
#[case::other_index(".idx", Some("no index"), "it is shorter than")]
#[case::no_index(".idx", None, ".bin`: it exists, and others of its files do not")]
#[case::no_description(".megaburn", None, "its description is missing")]
#[case::cut_description(".megaburn", Some("{"), "its description is missing")]
fn a_damaged_cache_says_what_to_remove(
    #[case] ending: &str,
    #[case] content: Option<&str>,
    #[case] why: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.txt");
    fs::write(&path, "abc").unwrap();
    let cache = TextCache::new(dir.path().join("cache"));
    let open = || cache.open(&path, &ByteTokenizer, |_| ());
    let expected = all(&open().unwrap());
    let prefix = cache.prefix_of(&path, &ByteTokenizer).unwrap();
    let damaged = with_ending(&prefix, ending);
    match content {
        Some(content) => fs::write(damaged, content).unwrap(),
        None => fs::remove_file(damaged).unwrap(),
    }
    let error = open().unwrap_err().to_string();
    let remedy = format!("remove `{}.*`", prefix.display());
    assert!(error.contains(why) && error.contains(&remedy), "{error}");
    assert!(!error.contains("--force"), "{error}");
    for entry in fs::read_dir(dir.path().join("cache")).unwrap() {
        fs::remove_file(entry.unwrap().path()).unwrap();
    }
    assert_eq!(all(&open().unwrap()), expected);
}

#[test]
fn what_a_killed_process_left_is_removed_and_what_is_of_others_stays() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.txt");
    fs::write(&path, "abc").unwrap();
    let cache = TextCache::new(dir.path().join("cache"));
    let open = || cache.open(&path, &ByteTokenizer, |_| ());
    let prefix = cache.prefix_of(&path, &ByteTokenizer).unwrap();
    let index = with_ending(&prefix, ".idx");
    let part = with_ending(&prefix, ".megaburn-part");
    let mut left = 0;
    for operations in 0.. {
        fuse::allow(dir.path(), operations);
        let found = open();
        fuse::remove(dir.path());
        left += usize::from(part.exists() && index.exists());
        let is_whole = found.is_ok() && !part.exists();
        assert_eq!(all(&open().unwrap()), [97, 98, 99]);
        assert!(!part.exists(), "{operations}");
        if is_whole {
            break;
        }
        fs::remove_dir_all(dir.path().join("cache")).unwrap();
    }
    assert!(left > 3, "only {left} were left");
    fs::create_dir(&part).unwrap();
    fs::write(part.join("0.bin"), "mine").unwrap();
    assert_eq!(all(&open().unwrap()), [97, 98, 99]);
    assert_eq!(fs::read(part.join("0.bin")).unwrap(), b"mine");
}

#[rstest]
#[case::a_file(".megaburn-part", false, "it cannot be read: Not a directory")]
#[case::a_folder(".bin", true, ".bin`: it exists, and others of its files do not")]
#[case::a_folder_as_index(".idx", true, "it cannot be read: is a directory")]
fn what_is_in_the_way_is_named_and_stays(
    #[case] ending: &str,
    #[case] is_folder: bool,
    #[case] why: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.txt");
    fs::write(&path, "abc").unwrap();
    let cache = TextCache::new(dir.path().join("cache"));
    fs::create_dir(dir.path().join("cache")).unwrap();
    let prefix = cache.prefix_of(&path, &ByteTokenizer).unwrap();
    let other = with_ending(&prefix, ending);
    match is_folder {
        true => fs::create_dir(&other).unwrap(),
        false => fs::write(&other, "mine").unwrap(),
    }
    let error = cache.open(&path, &ByteTokenizer, |_| ()).unwrap_err();
    let error = error.to_string();
    let remedy = format!("remove `{}.*`", prefix.display());
    assert!(error.contains(why) && error.contains(&remedy), "{error}");
    assert!(other.exists());
}

#[test]
fn the_cache_and_the_text_must_be_what_they_are_named_for() {
    let dir = tempfile::tempdir().unwrap();
    let [text, file] = ["a.txt", "cache"].map(|name| dir.path().join(name));
    fs::write(&text, "abc").unwrap();
    fs::write(&file, "abc").unwrap();
    let refusal = |cache: &Path, text: &Path| {
        let opened = TextCache::new(cache).open(text, &ByteTokenizer, |_| ());
        opened.unwrap_err().to_string()
    };
    let found = refusal(&file, &text);
    assert!(
        found.contains("cache` in the cache cannot be written"),
        "{found}"
    );
    let cache = dir.path().join("folder");
    let found = refusal(&cache, dir.path());
    assert!(found.contains("is a directory"), "{found}");
    let found = refusal(&cache, Path::new("/dev/null"));
    assert!(found.contains("is no regular file"), "{found}");
    let found = refusal(&cache, &dir.path().join("none"));
    assert!(found.contains("does not exist"), "{found}");
}

#[test]
fn unfinished_work_that_is_damaged_says_what_to_remove() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.jsonl");
    fs::write(&path, "{\"text\": \"a\"}\n").unwrap();
    let cache = TextCache::new(dir.path().join("cache"));
    let prefix = cache.prefix_of(&path, &ByteTokenizer).unwrap();
    let part = with_ending(&prefix, ".megaburn-part");
    fs::create_dir_all(&part).unwrap();
    fs::write(part.join("0.bin"), "mine").unwrap();
    let error = cache.open(&path, &ByteTokenizer, |_| ()).unwrap_err();
    let error = error.to_string();
    let remedy = format!("remove `{}.*`", prefix.display());
    assert!(
        error.contains("it has no journal") && error.contains(&remedy),
        "{error}"
    );
}
