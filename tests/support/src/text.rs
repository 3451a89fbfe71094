//! Random text to train on.

use std::{
    env, fs,
    hash::{BuildHasher, RandomState},
    path::Path,
    sync::OnceLock,
};

use megaburn::mesh::{PositionRng, Purpose};

/// A seed that is drawn once per run of the tests and printed. `MEGABURN_TEST_SEED` sets it, to
/// repeat a failure.
///
/// # Panics
/// If `MEGABURN_TEST_SEED` is not a number.
pub fn fresh_seed() -> u64 {
    static SEED: OnceLock<u64> = OnceLock::new();
    let seed = *SEED.get_or_init(|| match env::var("MEGABURN_TEST_SEED") {
        Ok(seed) => seed.parse().expect("MEGABURN_TEST_SEED is a number"),
        Err(_) => RandomState::new().hash_one("seed"),
    });
    println!("the text is drawn from seed {seed}");
    seed
}

/// Writes `len` random characters; each is one byte and so one token of the byte tokenizer.
pub fn write_random_text(path: &Path, len: usize, seed: u64) {
    let rng = PositionRng::new(seed, Purpose::Sampling, "text");
    let text = (0..len as u64).map(|index| rng.below(index, 128) as u8 as char);
    fs::write(path, text.collect::<String>()).unwrap();
}

/// Writes `num` documents of 1 to `longest` random letters each, as JSON lines.
pub fn write_random_documents(path: &Path, num: u64, longest: u64, seed: u64) {
    let rng = PositionRng::new(seed, Purpose::Sampling, "documents");
    let document = |index: u64| {
        let rng = rng.with_stream(index);
        let letters = (1..=1 + rng.below(0, longest)).map(|at| b'a' + rng.below(at, 26) as u8);
        let text: String = letters.map(char::from).collect();
        format!("{{\"text\": \"{text}\"}}\n")
    };
    fs::write(path, (0..num).map(document).collect::<String>()).unwrap();
}

/// Writes `num` words, separated by spaces, each drawn from 200 random words of 2 to 9 letters. Unlike
/// [`write_random_text`], a model learns this text: its words repeat.
pub fn write_random_words(path: &Path, num: u64, seed: u64) {
    let rng = PositionRng::new(seed, Purpose::Sampling, "words");
    let word = |number: u64| {
        let rng = rng.with_stream(number);
        let letters = (1..3 + rng.below(0, 8)).map(|at| b'a' + rng.below(at, 26) as u8);
        letters.map(char::from).collect::<String>()
    };
    let words: Vec<String> = (0..200).map(word).collect();
    let text = (0..num).map(|index| words[rng.below(index, 200) as usize].as_str());
    fs::write(path, text.collect::<Vec<_>>().join(" ")).unwrap();
}
