//! All damage of a checkpoint is found and named.

use std::{
    fs,
    path::{Path, PathBuf},
};

use megaburn_checkpoint::{Checkpoint, Damage, Manifest, bytes_to_examine, examine};
use safetensors::SafeTensors;
use xxhash_rust::xxh3::xxh3_64;

use crate::model::{Random, save_as};

fn hex(bytes: &[u8]) -> String {
    format!("{:016x}", xxh3_64(bytes))
}

fn write_manifest(checkpoint: &Path, manifest: &Manifest) {
    let text = serde_json::to_vec(manifest).unwrap();
    fs::write(checkpoint.join("manifest.xxh3"), hex(&text)).unwrap();
    fs::write(checkpoint.join("manifest.json"), text).unwrap();
}

/// Gives a checkpoint chunks of 16 bytes, or none, as older versions wrote it.
fn with_chunks(checkpoint: &Path, chunk: Option<u64>) -> Manifest {
    let mut manifest = Checkpoint::open(checkpoint).unwrap().manifest().clone();
    manifest.chunk_bytes = chunk;
    for file in &mut manifest.files {
        let bytes = fs::read(checkpoint.join(&file.name)).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        for piece in &mut file.pieces {
            let data = tensors.tensor(&piece.key).unwrap().data().to_vec();
            let size = chunk.map_or(usize::MAX, |chunk| chunk as usize);
            piece.chunks = data.chunks(size).map(hex).collect();
            piece
                .chunks
                .truncate(if chunk.is_some() { usize::MAX } else { 0 });
        }
    }
    write_manifest(checkpoint, &manifest);
    manifest
}

/// A file, a tensor, and its chunk of how many.
type Place = (PathBuf, Option<String>, Option<(usize, usize)>);

fn damage(checkpoint: &Path) -> Vec<Damage> {
    examine(checkpoint, &mut |_| {}).unwrap().damage
}

fn flip(file: &Path, at: usize) {
    let mut bytes = fs::read(file).unwrap();
    bytes[at] ^= 4;
    fs::write(file, bytes).unwrap();
}

/// Where the bytes of a piece begin in its file.
fn start(file: &Path, key: &str) -> usize {
    let bytes = fs::read(file).unwrap();
    let data = SafeTensors::deserialize(&bytes)
        .unwrap()
        .tensor(key)
        .unwrap()
        .data()
        .to_vec();
    let found = bytes.windows(data.len()).position(|window| window == data);
    found.unwrap()
}

#[test]
fn a_whole_checkpoint_is_read_once_and_has_no_damage() {
    let dir = tempfile::tempdir().unwrap();
    let path = save_as(dir.path(), 1, 3, "tp4");
    let mut read = 0;
    let found = examine(&path, &mut |bytes| read += bytes).unwrap();
    assert!(found.damage.is_empty());
    assert_eq!((found.num_files, found.num_bytes), (4, read));
    assert_eq!(bytes_to_examine(&path), read);
    assert_eq!(bytes_to_examine(dir.path()), 0);
}

#[test]
fn every_damaged_chunk_tensor_and_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = save_as(dir.path(), 1, 3, "tp2");
    let manifest = with_chunks(&path, Some(16));
    assert!(damage(&path).is_empty());
    let mut random = Random::fresh();
    let [first, second] = [0, 1].map(|file| path.join(&manifest.files[file].name));
    // Two chunks of one piece and one of another, all in the first file.
    let long = |name: &str| {
        let pieces = &manifest.files[0].pieces;
        pieces.iter().find(|piece| piece.tensor == name).unwrap()
    };
    let [one, other] = [
        long("model.layers.0.gate_up.weight"),
        long("model.embedding.weight"),
    ];
    let num_chunks = one.chunks.len();
    assert!(num_chunks > 3);
    let last = num_chunks - 1;
    let mut expected: Vec<Place> = Vec::new();
    for (piece, chunk) in [(one, 1), (one, last), (other, 0)] {
        let at = start(&first, &piece.key) + chunk * 16 + random.below(8) as usize;
        flip(&first, at);
        let place = Some((chunk, piece.chunks.len()));
        expected.push((first.clone(), Some(piece.tensor.clone()), place));
    }
    // The second file loses its end.
    let len = fs::metadata(&second).unwrap().len();
    fs::File::options()
        .write(true)
        .open(&second)
        .unwrap()
        .set_len(len - 1)
        .unwrap();
    expected.push((second.clone(), None, None));
    let places = |found: Vec<Damage>| {
        let mut places: Vec<_> = found
            .into_iter()
            .map(|of| (of.file, of.tensor, of.chunk))
            .collect();
        places.sort();
        places
    };
    expected.sort();
    assert_eq!(places(damage(&path)), expected);
    fs::remove_file(&second).unwrap();
    let found = damage(&path);
    assert!(
        found
            .iter()
            .any(|of| of.file == second && of.why == "it is missing"),
        "{found:?}"
    );
    assert_eq!(places(found), expected);
}

#[test]
fn a_header_and_a_file_without_chunks_are_damaged_as_a_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = save_as(dir.path(), 1, 3, "tp1");
    let manifest = with_chunks(&path, None);
    let file = path.join(&manifest.files[0].name);
    let whole = fs::read(&file).unwrap();
    flip(&file, whole.len() - 1);
    let found = damage(&path);
    assert_eq!(found.len(), 1);
    assert!(
        found[0].tensor.is_none() && found[0].why.contains("its xxh3 is not "),
        "{found:?}"
    );

    fs::write(&file, &whole).unwrap();
    with_chunks(&path, Some(16));
    // A byte of the header's text: of a name, or of its syntax.
    for at in 8..40 {
        flip(&file, at);
        let found = damage(&path);
        assert!(
            !found.is_empty() && found[0].file == file,
            "{at}: {found:?}"
        );
        fs::write(&file, &whole).unwrap();
    }
    flip(&path.join("manifest.json"), 20);
    let found = examine(&path, &mut |_| {}).unwrap();
    assert_eq!((found.num_files, found.damage.len()), (0, 1));
    assert!(found.damage[0].file.ends_with("manifest.json"), "{found:?}");
}

#[test]
fn another_version_is_no_damage() {
    let dir = tempfile::tempdir().unwrap();
    let path = save_as(dir.path(), 1, 3, "tp1");
    let mut manifest = Checkpoint::open(&path).unwrap().manifest().clone();
    manifest.format = 99;
    write_manifest(&path, &manifest);
    let error = examine(&path, &mut |_| {}).unwrap_err();
    assert!(
        !error.is_damage() && error.to_string().contains("format 99"),
        "{error}"
    );
}
