//! Tests with files that PyTorch and Megatron-Core wrote: `tests/tools/torch_formats.py` made them.

use std::fs;
use std::path::{Path, PathBuf};

mod hostile_pickles;
mod pickles;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures/torch")
        .join(name)
}

fn read(name: &str) -> Vec<u8> {
    let path = fixture(name);
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
