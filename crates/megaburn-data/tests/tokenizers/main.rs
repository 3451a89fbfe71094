//! Tests of Hugging Face tokenizers: files that Python's library wrote, and tokenizers trained
//! here.

use std::path::{Path, PathBuf};

use megaburn_data::HfTokenizer;

mod damage;
mod files;
mod open;
mod parity;
mod stream;
mod threads;
mod train;

/// The tokenizers that `tests/tools/hf_tokenizers.py` wrote.
const FIXTURES: [&str; 5] = ["byte-level", "llama3", "llama2", "mistral", "unigram"];

fn fixtures(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures")
        .join(name)
}

fn folder(name: &str) -> PathBuf {
    fixtures("tokenizers").join(name)
}

fn fixture(name: &str) -> HfTokenizer {
    HfTokenizer::open(folder(name)).unwrap()
}
