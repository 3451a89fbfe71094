//! Identifies the build of the program that a process runs.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    sync::OnceLock,
};

use xxhash_rust::xxh3::Xxh3;

/// The name of this program's build: its version and a hash of the executable. Ranks of different
/// builds would not understand each other or, worse, would compute different things.
///
/// The hash covers the executable's length and evenly spaced samples of it, so that hashing a large
/// executable takes only a few milliseconds. Two builds differ almost everywhere.
pub(super) fn name() -> &'static str {
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(|| {
        let version = env!("CARGO_PKG_VERSION");
        let hash = std::env::current_exe().and_then(File::open).and_then(hash);
        match hash {
            Ok(hash) => format!("{version}-{hash:016x}"),
            // Then only the version can be compared.
            Err(_) => version.to_string(),
        }
    })
}

fn hash(mut file: impl Read + Seek) -> io::Result<u64> {
    const SAMPLES: u64 = 256;
    const SAMPLE: usize = 16 << 10;
    let len = file.seek(SeekFrom::End(0))?;
    let mut hash = Xxh3::new();
    hash.update(&len.to_le_bytes());
    let mut sample = Vec::with_capacity(SAMPLE);
    for i in 0..SAMPLES {
        file.seek(SeekFrom::Start(len / SAMPLES * i))?;
        sample.clear();
        file.by_ref().take(SAMPLE as u64).read_to_end(&mut sample)?;
        hash.update(&sample);
    }
    Ok(hash.digest())
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    #[test]
    fn builds_of_other_length_or_content_have_other_names() {
        let mut program = vec![7u8; 1 << 20];
        let first = hash(Cursor::new(&program)).unwrap();
        assert_eq!(hash(Cursor::new(&program)).unwrap(), first);
        program[1 << 19] = 8;
        assert_ne!(hash(Cursor::new(&program)).unwrap(), first);
        program[1 << 19] = 7;
        program.push(7);
        assert_ne!(hash(Cursor::new(&program)).unwrap(), first);
        assert!(
            name().starts_with(concat!(env!("CARGO_PKG_VERSION"), "-")),
            "{}",
            name()
        );
    }
}
