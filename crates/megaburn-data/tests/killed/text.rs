//! Texts that are encoded into a cache, by several processes at a time.

use std::{fs, path::Path, time::Instant};

use megaburn_data::{ByteTokenizer, Corpus, TextCache, TextCacheEvent, TokenDataset};

use crate::process::{end, files, finish, folder, kill, num_cases, start, words};

pub(crate) const JOB: &str = "text::open_text";

/// All tokens.
fn tokens(set: &TokenDataset) -> Vec<u32> {
    set.sample(set.num_tokens() as usize - 1, 0).unwrap()
}

/// Not a test, but the process that others kill: it opens a text, compares it with the one in
/// memory, and prints a line for each event.
#[test]
fn open_text() {
    let Some(folder) = folder() else {
        return;
    };
    let text = folder.parent().unwrap().join("a.txt");
    let cache = TextCache::new(folder.join("cache"));
    let set = cache.open(&text, &ByteTokenizer, |event| match event {
        TextCacheEvent::Waiting => println!("waiting"),
        _ => println!("event"),
    });
    let set = match set {
        Ok(set) => set,
        Err(error) => return println!("refused {error}"),
    };
    let corpus = Corpus::from_file(&text).unwrap();
    let expected = TokenDataset::new(&corpus, &ByteTokenizer).unwrap();
    assert!(tokens(&set) == tokens(&expected), "other tokens");
    assert_eq!(set.fingerprint().unwrap(), corpus.hash());
    println!("written {}", set.num_tokens());
}

pub(crate) fn write_text(dir: &Path, draw: &mut fastrand::Rng) {
    fs::write(dir.join("a.txt"), words(draw, 3 << 20).join("\n")).unwrap();
}

#[test]
fn a_text_is_cached_whole_or_not_at_all() {
    let num_cases = num_cases();
    let seed = fastrand::u64(..);
    let mut draw = fastrand::Rng::with_seed(seed);
    let dir = tempfile::tempdir().unwrap();
    write_text(dir.path(), &mut draw);
    let whole = dir.path().join("whole");
    let begun = Instant::now();
    let num_events = finish(JOB, &whole).matches("event").count();
    let time = begun.elapsed();
    let expected = files(&whole);
    assert_eq!(expected.len(), 3);

    let (mut killed, mut left) = (0, 0);
    for case in 0..num_cases {
        let folder = dir.path().join(case.to_string());
        // What others left is finished while it is waited for.
        let others: Vec<_> = (0..draw.usize(0..3)).map(|_| start(JOB, &folder)).collect();
        let process = start(JOB, &folder);
        let time = time.mul_f64(draw.f64() * 0.5);
        killed += usize::from(kill(process, draw.usize(0..=num_events), time));
        let is_alone = others.is_empty() && folder.join("cache").exists();
        left += usize::from(is_alone && files(&folder) != expected);
        others.into_iter().for_each(|other| drop(end(other)));
        finish(JOB, &folder);
        assert!(
            files(&folder) == expected,
            "other files, case {case}, seed {seed}"
        );
        fs::remove_dir_all(&folder).unwrap();
    }
    println!("{killed} killed in {num_cases} cases; {left} without others left work");
}
