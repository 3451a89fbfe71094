//! Opens files, unpacks those that are compressed, and removes byte order marks.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use flate2::bufread::GzDecoder;
use ruzstd::decoding::{
    BlockDecodingStrategy, FrameDecoder,
    errors::{FrameDecoderError, ReadFrameHeaderError},
};

/// How a file is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Packing {
    /// It is not.
    None,
    /// With gzip, in one or several members.
    Gzip,
    /// With Zstandard, in one or several frames.
    Zstd,
}

impl Packing {
    /// The compression that the lower-case ending of a file name stands for.
    pub(super) fn of_ending(ending: &str) -> Self {
        match ending {
            "gz" => Self::Gzip,
            "zst" => Self::Zstd,
            _ => Self::None,
        }
    }
}

const BUFFER: usize = 1 << 18;
const BYTE_ORDER_MARK: &[u8] = "\u{FEFF}".as_bytes();

/// Opens a file after the first `skip` bytes of its text, which do not count the byte order mark.
/// `read` is the number of bytes of the file that were read, compressed as they are.
pub(super) fn open(
    path: &Path,
    packing: Packing,
    skip: u64,
    read: &Arc<AtomicU64>,
) -> io::Result<Box<dyn BufRead>> {
    let mut file = File::open(path)?;
    read.store(0, Relaxed);
    if packing == Packing::None && skip > 0 {
        let mark = usize::from(starts_with_mark(&file)?) * BYTE_ORDER_MARK.len();
        let at = skip + mark as u64;
        file.seek(SeekFrom::Start(at))?;
        read.store(at, Relaxed);
        let counted = Counting(file, read.clone());
        return Ok(Box::new(BufReader::with_capacity(BUFFER, counted)));
    }
    let counted = BufReader::with_capacity(BUFFER, Counting(file, read.clone()));
    let unpacked: Box<dyn BufRead> = match packing {
        Packing::None => Box::new(counted),
        Packing::Gzip => Box::new(BufReader::with_capacity(BUFFER, Members::new(counted))),
        Packing::Zstd => Box::new(BufReader::with_capacity(BUFFER, Frames::new(counted))),
    };
    let mut text = without_mark(unpacked)?;
    let skipped = io::copy(&mut text.by_ref().take(skip), &mut io::sink())?;
    if skipped < skip {
        return Err(io::Error::new(
            ErrorKind::UnexpectedEof,
            format!("its text ends after {skipped} bytes, and {skip} were read before"),
        ));
    }
    Ok(text)
}

fn starts_with_mark(mut file: &File) -> io::Result<bool> {
    let mut start = Vec::new();
    Read::take(&mut file, BYTE_ORDER_MARK.len() as u64).read_to_end(&mut start)?;
    Ok(start == BYTE_ORDER_MARK)
}

fn without_mark(mut text: Box<dyn BufRead>) -> io::Result<Box<dyn BufRead>> {
    let mut start = Vec::new();
    let count = BYTE_ORDER_MARK.len() as u64;
    text.by_ref().take(count).read_to_end(&mut start)?;
    if start == BYTE_ORDER_MARK {
        return Ok(text);
    }
    Ok(Box::new(Cursor::new(start).chain(text)))
}

/// Counts the bytes that are read.
struct Counting<R>(R, Arc<AtomicU64>);

impl<R: Read> Read for Counting<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.0.read(buffer)?;
        self.1.fetch_add(count as u64, Relaxed);
        Ok(count)
    }
}

/// The text of all gzip members of a file, one after another. As `gunzip`, it accepts zeros behind
/// them, with which some archives fill their blocks.
enum Members<R: BufRead> {
    Inside(Box<GzDecoder<R>>),
    Between(R),
    Ended,
}

impl<R: BufRead> Members<R> {
    fn new(source: R) -> Self {
        Self::Inside(Box::new(GzDecoder::new(source)))
    }

    /// Whether another member follows.
    fn has_next(source: &mut R) -> io::Result<bool> {
        if source.fill_buf()?.first().is_some_and(|byte| *byte != 0) {
            return Ok(true);
        }
        loop {
            let bytes = source.fill_buf()?;
            if bytes.iter().any(|byte| *byte != 0) {
                let why = "other bytes follow the zeros behind its gzip stream";
                return Err(io::Error::new(ErrorKind::InvalidData, why));
            }
            let count = bytes.len();
            if count == 0 {
                return Ok(false);
            }
            source.consume(count);
        }
    }
}

impl<R: BufRead> Read for Members<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let has_next = match self {
                Self::Inside(member) => {
                    let count = member.read(buffer)?;
                    if count > 0 || buffer.is_empty() {
                        return Ok(count);
                    }
                    false
                }
                Self::Between(source) => Self::has_next(source)?,
                Self::Ended => return Ok(0),
            };
            *self = match std::mem::replace(self, Self::Ended) {
                Self::Inside(member) => Self::Between(member.into_inner()),
                Self::Between(source) if has_next => Self::new(source),
                _ => Self::Ended,
            };
        }
    }
}

/// The text of all Zstandard frames of a file, one after another.
struct Frames<R: BufRead> {
    source: R,
    decoder: FrameDecoder,
    is_inside: bool,
}

impl<R: BufRead> Frames<R> {
    fn new(source: R) -> Self {
        Self {
            source,
            decoder: FrameDecoder::new(),
            is_inside: false,
        }
    }

    /// Begins the next frame, or skips one that has no text.
    fn begin(&mut self) -> io::Result<()> {
        match self.decoder.init(&mut self.source) {
            Ok(()) => self.is_inside = true,
            Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                length,
                ..
            })) => {
                let mut skipped = self.source.by_ref().take(length.into());
                io::copy(&mut skipped, &mut io::sink())?;
            }
            Err(error) => return Err(io::Error::other(error)),
        }
        Ok(())
    }

    fn end(&mut self) -> io::Result<()> {
        self.is_inside = false;
        let expected = self.decoder.get_checksum_from_data();
        if expected.is_some() && expected != self.decoder.get_calculated_checksum() {
            return Err(io::Error::other(
                "the checksum of a Zstandard frame is wrong",
            ));
        }
        Ok(())
    }
}

impl<R: BufRead> Read for Frames<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.is_inside {
                if self.source.fill_buf()?.is_empty() {
                    return Ok(0);
                }
                self.begin()?;
                continue;
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                let one = BlockDecodingStrategy::UptoBlocks(1);
                let decoded = self.decoder.decode_blocks(&mut self.source, one);
                decoded.map_err(io::Error::other)?;
            }
            let count = self.decoder.read(buffer)?;
            if count > 0 || buffer.is_empty() {
                return Ok(count);
            }
            self.end()?;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::{Compression, write::GzEncoder};
    use rstest::rstest;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    use super::*;

    fn pack(packing: Packing, text: &[u8]) -> Vec<u8> {
        match packing {
            Packing::None => text.into(),
            Packing::Gzip => {
                let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
                encoder.write_all(text).unwrap();
                encoder.finish().unwrap()
            }
            Packing::Zstd => compress_to_vec(text, CompressionLevel::Fastest),
        }
    }

    fn read_all(bytes: &[u8], packing: Packing, skip: u64) -> io::Result<(Vec<u8>, u64)> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        std::fs::write(&path, bytes).unwrap();
        let (mut text, read) = (Vec::new(), Arc::default());
        open(&path, packing, skip, &read)?.read_to_end(&mut text)?;
        Ok((text, read.load(Relaxed)))
    }

    #[rstest]
    fn any_packing_gives_the_text_after_what_was_read(
        #[values(Packing::None, Packing::Gzip, Packing::Zstd)] packing: Packing,
        #[values("", "\u{FEFF}")] mark: &str,
        #[values(0, 1, 300_001, 600_002)] skip: usize,
    ) {
        let half = "größer, ".repeat(30_000) + "x";
        let half = half.as_bytes();
        assert_eq!(half.len(), 300_001);
        // Members and frames may follow each other, and frames without text are skipped.
        let mut bytes = pack(packing, &[mark.as_bytes(), half].concat());
        if packing == Packing::Zstd {
            bytes.extend([0x50, 0x2A, 0x4D, 0x18, 3, 0, 0, 0, 1, 2, 3]);
        }
        bytes.extend(pack(packing, half));
        let (text, read) = read_all(&bytes, packing, skip as u64).unwrap();
        assert!(text == [half, half].concat()[skip..]);
        assert_eq!(read, bytes.len() as u64);
    }

    #[rstest]
    fn a_file_that_is_cut_or_damaged_is_an_error(
        #[values(Packing::Gzip, Packing::Zstd)] packing: Packing,
    ) {
        let text: Vec<u8> = (0..100_000u32)
            .flat_map(|i| i.wrapping_pow(2).to_le_bytes())
            .collect();
        let bytes = pack(packing, &text);
        for cut in [3, bytes.len() / 2, bytes.len() - 1] {
            assert!(read_all(&bytes[..cut], packing, 0).is_err(), "{cut}");
        }
        assert!(read_all(b"plain text", packing, 0).is_err());
        assert!(read_all(&bytes, packing, text.len() as u64 + 1).is_err());
    }

    #[test]
    fn zeros_behind_a_gzip_stream_are_no_text() {
        let mut bytes = pack(Packing::Gzip, b"text");
        bytes.extend(pack(Packing::Gzip, b" of two members"));
        bytes.resize(bytes.len() + 3 * BUFFER + 1, 0);
        let (text, read) = read_all(&bytes, Packing::Gzip, 0).unwrap();
        assert_eq!(text, b"text of two members");
        assert_eq!(read, bytes.len() as u64);
        bytes.push(1);
        let refusal = read_all(&bytes, Packing::Gzip, 0).unwrap_err().to_string();
        assert!(
            refusal.contains("other bytes follow the zeros"),
            "{refusal}"
        );
        assert!(read_all(&[0; 100], Packing::Gzip, 0).is_err());
    }

    #[test]
    fn a_short_text_may_have_no_mark() {
        for text in ["", "a", "\u{FF}", "\u{FEFE}"] {
            assert_eq!(
                read_all(text.as_bytes(), Packing::None, 0).unwrap().0,
                text.as_bytes()
            );
        }
    }
}
