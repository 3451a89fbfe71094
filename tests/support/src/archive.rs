//! Fixtures that are stored as archives, because their many small files compress well.

use std::{
    fs::{self, File},
    hash::{DefaultHasher, Hash, Hasher},
    io::Read,
    path::{Path, PathBuf},
};

use flate2::read::GzDecoder;

/// Bytes of a header of a tar file, and the unit of its contents.
const BLOCK: usize = 512;

/// The folder with the files of an archive `NAME.tar.gz`. It is unpacked once, into a folder of
/// `cache` that the contents name.
///
/// # Panics
/// If the archive cannot be read, or has anything but files and folders with short names.
pub fn unpacked(archive: &Path, cache: &Path) -> PathBuf {
    let packed = fs::read(archive).unwrap();
    let mut hasher = DefaultHasher::new();
    packed.hash(&mut hasher);
    let name = archive.file_name().unwrap().to_str().unwrap();
    let name = name.strip_suffix(".tar.gz").unwrap();
    let folder = cache.join(format!("{name}-{:016x}", hasher.finish()));
    if folder.exists() {
        return folder.join(name);
    }
    fs::create_dir_all(cache).unwrap();
    let new = tempfile::tempdir_in(cache).unwrap();
    let mut all = Vec::new();
    GzDecoder::new(&packed[..]).read_to_end(&mut all).unwrap();
    for (path, contents) in files(&all) {
        let path = new.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, contents).unwrap();
    }
    // Another thread or process may have been faster.
    if fs::rename(new.path(), &folder).is_ok() {
        let _moved = new.keep();
    }
    assert!(folder.exists(), "{} was not unpacked", archive.display());
    folder.join(name)
}

/// The paths and contents of a tar file's files.
fn files(mut tar: &[u8]) -> Vec<(String, &[u8])> {
    let mut found = Vec::new();
    while let Some((header, rest)) = tar.split_first_chunk::<BLOCK>() {
        if header.iter().all(|byte| *byte == 0) {
            break;
        }
        let text = |range: std::ops::Range<usize>| {
            let field = header[range].split(|byte| *byte == 0).next().unwrap();
            std::str::from_utf8(field).unwrap().trim().to_string()
        };
        let path = text(0..100);
        let len = usize::from_str_radix(&text(124..136), 8).unwrap();
        match header[156] {
            b'0' => found.push((path, &rest[..len])),
            b'5' => {}
            kind => panic!("{path} has the type {kind} of a tar file"),
        }
        tar = &rest[len.next_multiple_of(BLOCK)..];
    }
    found
}

/// The path of a fixture in `folder`: a file or folder `name`, or the archive of it, unpacked into
/// `cache`.
///
/// # Panics
/// As [`unpacked`], or if there is neither.
pub fn fixture_in(folder: &Path, name: &str, cache: &Path) -> PathBuf {
    let plain = folder.join(name);
    if plain.exists() {
        return plain;
    }
    let archive = folder.join(format!("{name}.tar.gz"));
    assert!(
        File::open(&archive).is_ok(),
        "there is no {}",
        archive.display()
    );
    unpacked(&archive, cache)
}
