//! The bytes read from a checkpoint are verified while they are read.

use std::{fs, ops::Range, path::PathBuf};

use megaburn_checkpoint::{Checkpoint, TensorSource, find_latest};
use serde_json::Value;
use tempfile::TempDir;

use crate::{
    chunks::{remove_chunks, set_chunk_bytes},
    model::{alone, check, save_as, tensors},
};

/// An older and a newer checkpoint, each with four rank files.
fn two() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    save_as(dir.path(), 2, 10, "tp4");
    let newest = save_as(dir.path(), 2, 20, "tp4");
    (dir, newest)
}

/// The bytes that a rank uses are verified while it reads them, whatever was verified before.
#[test]
fn a_bit_that_flips_after_the_verification_is_found_where_it_is_read() {
    let (dir, newest) = two();
    let latest = find_latest(dir.path(), &alone())
        .unwrap()
        .checkpoint
        .unwrap();
    latest.verify().unwrap();
    let path = newest.join("rank-00000.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[8 + header + 3] ^= 16;
    fs::write(&path, bytes).unwrap();
    let read = |checkpoint: &Checkpoint, name: &str| {
        let tensor = tensors(0, 1)
            .into_iter()
            .find(|tensor| tensor.name == name)
            .unwrap();
        checkpoint.read(name, &tensor.shard, tensor.dtype)
    };
    let fresh = Checkpoint::open(&newest).unwrap();
    for checkpoint in [&latest, &fresh] {
        let first = tensors(0, 1).into_iter().map(|tensor| tensor.name);
        let wrong: Vec<_> = first
            .filter_map(|name| Some((name, read(checkpoint, name).err()?)))
            .collect();
        let [(name, error)] = wrong.as_slice() else {
            panic!("{wrong:?}")
        };
        let text = error.to_string();
        assert!(error.is_damage(), "{text}");
        for part in [
            "rank-00000.safetensors",
            &format!("tensor `{name}`"),
            "chunk 0 of 1",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
    let refused = find_latest(dir.path(), &alone()).unwrap().refused;
    assert!(refused[0].why.contains("tensor `"), "{}", refused[0].why);
}

/// Files are not memory-mapped: a file that shrinks is an error, where a mapping would kill the
/// process.
#[test]
fn a_file_that_is_cut_while_it_is_open_is_an_error() {
    let (_dir, newest) = two();
    let checkpoint = Checkpoint::open(&newest).unwrap();
    check(&checkpoint, 20, 1);
    let fresh = Checkpoint::open(&newest).unwrap();
    let norm = tensors(0, 1).pop().unwrap();
    fresh.read(norm.name, &norm.shard, norm.dtype).unwrap();
    for file in &checkpoint.manifest().files {
        let file = fs::File::options()
            .write(true)
            .open(newest.join(&file.name))
            .unwrap();
        file.set_len(0).unwrap();
    }
    for checkpoint in [&checkpoint, &fresh] {
        for tensor in tensors(0, 1) {
            let error = checkpoint
                .read(tensor.name, &tensor.shard, tensor.dtype)
                .unwrap_err();
            assert!(error.is_damage(), "{error}");
            assert!(error.to_string().contains("rank-0000"), "{error}");
        }
    }
    assert!(checkpoint.verify().unwrap_err().is_damage());
}

/// Checkpoints of older versions have no chunk hashes.
#[test]
fn a_checkpoint_without_hashes_of_chunks_is_read_and_its_files_are_verified() {
    let (dir, newest) = two();
    remove_chunks(&[&newest]);
    for tp in [1, 2, 4] {
        check(
            &find_latest(dir.path(), &alone())
                .unwrap()
                .checkpoint
                .unwrap(),
            20,
            tp,
        );
    }
    let file = newest.join("rank-00003.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    let latest = find_latest(dir.path(), &alone()).unwrap();
    check(&latest.checkpoint.unwrap(), 10, 2);
    assert!(
        latest.refused[0].why.contains("rank-00003"),
        "{}",
        latest.refused[0].why
    );
}

/// Uses smaller chunks than the default, so that a small tensor has many.
#[test]
fn a_slice_reads_and_checks_only_the_chunks_that_it_touches() {
    let (_dir, newest) = two();
    set_chunk_bytes(&[&newest], 32);
    for tp in [1, 2, 4, 8] {
        check(&Checkpoint::open(&newest).unwrap(), 20, tp);
    }
    // The down projection has 16 rows of 6 values, 4 rows per file; a chunk holds between two and
    // three rows.
    let name = "model.layers.0.down.weight";
    let file = newest.join("rank-00001.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let text: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let start = text[format!("{name}#4")]["data_offsets"][0]
        .as_u64()
        .unwrap() as usize;
    bytes[8 + header + start + 40] ^= 1;
    fs::write(&file, bytes).unwrap();
    let checkpoint = Checkpoint::open(&newest).unwrap();
    let rows = |rows: Range<usize>| checkpoint.read_rows(name, rows);
    rows(0..6).unwrap();
    rows(8..16).unwrap();
    let error = rows(7..8).unwrap_err().to_string();
    assert!(
        error.contains("bytes 32..48") && error.contains("chunk 1 of 2"),
        "{error}"
    );
    rows(4..6).unwrap();
}
