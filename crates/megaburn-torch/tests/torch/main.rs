//! Tests with files that PyTorch and Megatron-Core wrote: `tests/tools/torch_formats.py` made them.

use std::fs;
use std::path::{Path, PathBuf};

use megaburn_torch::pickle::Tree;

mod dcp;
mod dcp_errors;
mod dcp_write;
mod hostile_pickles;
mod megatron;
mod megatron_write;
mod pickles;
mod pt;
mod pt_errors;
mod pt_write;
mod weights;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures/torch")
        .join(name)
}

/// A checkpoint that `tests/tools/megatron_checkpoints.py` made.
fn megatron(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures/megatron-checkpoints")
        .join(name)
}

fn read(name: &str) -> Vec<u8> {
    let path = fixture(name);
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Where a test writes files: a new folder, or, so that PyTorch can read them afterwards, one of
/// this name in the folder `MEGABURN_TORCH_CHECK`.
fn check_folder(name: &str) -> CheckFolder {
    match std::env::var_os("MEGABURN_TORCH_CHECK") {
        Some(folder) => {
            let folder = Path::new(&folder).join(name);
            fs::create_dir_all(&folder).unwrap();
            CheckFolder::Kept(folder)
        }
        None => CheckFolder::Temporary(tempfile::tempdir().unwrap()),
    }
}

enum CheckFolder {
    Kept(PathBuf),
    Temporary(tempfile::TempDir),
}

impl CheckFolder {
    fn path(&self) -> &Path {
        match self {
            Self::Kept(path) => path,
            Self::Temporary(folder) => folder.path(),
        }
    }
}

fn unhex(text: &str) -> Vec<u8> {
    let digits = text.as_bytes().chunks(2);
    let bytes = digits.map(|pair| {
        let pair = std::str::from_utf8(pair).unwrap();
        u8::from_str_radix(pair, 16).unwrap()
    });
    bytes.collect()
}

/// The offsets and sizes of a region of a shape.
fn draw_region(shape: &[usize]) -> (Vec<usize>, Vec<usize>) {
    let draw = |len: &usize| {
        let offset = fastrand::usize(0..=*len);
        (offset, fastrand::usize(0..=len - offset))
    };
    shape.iter().map(draw).unzip()
}

/// A region of a row-major tensor, one element at a time.
fn slice(
    bytes: &[u8],
    item: usize,
    shape: &[usize],
    offsets: &[usize],
    sizes: &[usize],
) -> Vec<u8> {
    let mut found = Vec::new();
    for mut number in 0..sizes.iter().product() {
        let (mut at, mut stride) = (0, 1);
        for dim in (0..shape.len()).rev() {
            at += (offsets[dim] + number % sizes[dim]) * stride;
            number /= sizes[dim];
            stride *= shape[dim];
        }
        found.extend(&bytes[at * item..(at + 1) * item]);
    }
    found
}

fn copy_folder(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// A part of what `.metadata` says.
fn dcp_object(module: &str, name: &str, attributes: Vec<(&'static str, Tree)>) -> Tree {
    let module = format!("torch.distributed.checkpoint.{module}");
    Tree::object(Tree::global(&module, name), attributes)
}

fn torch_size(sizes: &[i64]) -> Tree {
    let sizes = Tree::Tuple(sizes.iter().map(|size| Tree::Int(*size)).collect());
    Tree::call(Tree::global("torch", "Size"), vec![sizes])
}
