//! Text to train on.

use std::{
    env, fs,
    hash::{BuildHasher, RandomState},
    path::Path,
    sync::OnceLock,
};

use megaburn::mesh::{PositionRng, Purpose};

/// Drawn anew in every run of the tests; printed, so that a failure shows it, and taken again from
/// `MEGABURN_TEST_SEED`.
pub(crate) fn fresh_seed() -> u64 {
    static SEED: OnceLock<u64> = OnceLock::new();
    let seed = *SEED.get_or_init(|| match env::var("MEGABURN_TEST_SEED") {
        Ok(seed) => seed.parse().expect("MEGABURN_TEST_SEED is a number"),
        Err(_) => RandomState::new().hash_one("seed"),
    });
    println!("the text is drawn from seed {seed}");
    seed
}

/// Writes `len` random characters, each of them one byte and so one token.
pub(crate) fn write_random_text(path: &Path, len: usize, seed: u64) {
    let rng = PositionRng::new(seed, Purpose::Sampling, "text");
    let text = (0..len as u64).map(|index| rng.below(index, 128) as u8 as char);
    fs::write(path, text.collect::<String>()).unwrap();
}
