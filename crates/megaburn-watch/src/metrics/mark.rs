//! What a reader hands back to continue where it stopped.

use std::{
    fs::{File, Metadata},
    io,
    os::unix::fs::{FileExt, MetadataExt},
};

use xxhash_rust::xxh3::xxh3_64;

/// The last bytes that were read are compared, up to this number.
const COMPARED: u64 = 256;

/// Sums over the lines that were read.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Sums {
    /// Tokens of all steps.
    pub(super) tokens: f64,
    /// Seconds of training, without the time between the starts of a run.
    pub(super) seconds: f64,
    /// When the last line was written, in seconds since 1970, if the last lines say so and are of
    /// the same start.
    pub(super) wall_time: f64,
}

/// A place in a file: the file, the bytes before the place, and the sums up to it. It travels as
/// text that only the server understands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Mark {
    pub(super) file: (u64, u64),
    before: u64,
    pub(super) sums: Sums,
}

/// The identity of a file. A file that is renamed over another one is another file.
pub(super) fn file_id(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

impl Mark {
    /// The mark of byte `at`, which the file has.
    pub(super) fn of(file: &File, at: u64, sums: Sums) -> io::Result<Self> {
        let compared = at.min(COMPARED);
        let mut bytes = vec![0; compared as usize];
        file.read_exact_at(&mut bytes, at - compared)?;
        Ok(Self {
            file: file_id(&file.metadata()?),
            before: xxh3_64(&bytes),
            sums,
        })
    }

    /// Whether the file is still the one in which the mark was made, up to byte `at`.
    pub(super) fn is_of(&self, file: &File, at: u64) -> io::Result<bool> {
        let size = file.metadata()?.len();
        Ok(size >= at && Self::of(file, at, self.sums)? == *self)
    }

    /// The mark as text of letters, digits and points.
    pub(super) fn text(&self) -> String {
        let Sums {
            tokens,
            seconds,
            wall_time,
        } = self.sums;
        let sums = [tokens, seconds, wall_time].map(|sum| format!("{:x}", sum.to_bits()));
        let (dev, ino) = self.file;
        format!("{dev:x}.{ino:x}.{:x}.{}", self.before, sums.join("."))
    }

    /// Reads a mark; `None` if the text is none.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let numbers = text.split('.').map(|part| u64::from_str_radix(part, 16));
        let numbers: Vec<u64> = numbers.collect::<Result<_, _>>().ok()?;
        let &[dev, ino, before, tokens, seconds, wall_time] = &numbers[..] else {
            return None;
        };
        Some(Self {
            file: (dev, ino),
            before,
            sums: Sums {
                tokens: f64::from_bits(tokens),
                seconds: f64::from_bits(seconds),
                wall_time: f64::from_bits(wall_time),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_mark_comes_back_and_knows_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m");
        fs::write(&path, "one\ntwo\n").unwrap();
        let file = File::open(&path).unwrap();
        let sums = Sums {
            tokens: 3.0,
            seconds: 0.1,
            wall_time: 1.8e9,
        };
        let mark = Mark::of(&file, 4, sums).unwrap();
        assert_eq!(Mark::parse(&mark.text()), Some(mark));
        assert!(mark.is_of(&file, 4).unwrap() && !mark.is_of(&file, 9).unwrap());
        // Other bytes before the place, in the same file.
        fs::write(&path, "ONE\ntwo\n").unwrap();
        assert!(!mark.is_of(&File::open(&path).unwrap(), 4).unwrap());
        // The same bytes in another file.
        fs::write(dir.path().join("n"), "one\ntwo\n").unwrap();
        fs::rename(dir.path().join("n"), &path).unwrap();
        assert!(!mark.is_of(&File::open(&path).unwrap(), 4).unwrap());
        for text in ["", "1.2", "1.2.3.4.5.x", "1.2.3.4.5.6.7"] {
            assert_eq!(Mark::parse(text), None, "{text}");
        }
    }
}
