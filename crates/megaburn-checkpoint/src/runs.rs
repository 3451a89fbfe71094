//! Reads the needed runs of a stored tensor in a few large reads.

use xxhash_rust::xxh3::Xxh3;

use crate::{chunks::Chunks, error::CheckpointError, tensor_bytes::TensorBytes};

/// Bytes per read: they fit into a core's L2 cache, so that copying them from there is cheap.
const BLOCK: usize = 1 << 20;
/// Runs with at most this many bytes between them are read together. From the page cache, reading
/// the gap costs about as much as another system call; from a disk or network, less.
pub(crate) const GAP: usize = 64 << 10;

/// The bytes of a tensor, or of a piece of one, in a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stored<'a> {
    pub(crate) file: &'a dyn TensorBytes,
    /// Offset of the first byte in the file.
    pub(crate) start: u64,
    /// Number of bytes.
    pub(crate) len: u64,
    /// Bytes per element.
    pub(crate) size: usize,
}

/// The elements to read from a stored tensor, and their destinations.
#[derive(Debug)]
pub(crate) struct Runs {
    /// Runs are split at multiples of this many elements.
    unit: usize,
    /// Elements of a chunk.
    chunk: usize,
    /// Number of stored elements.
    stored: usize,
    runs: Vec<Run>,
}

#[derive(Clone, Copy, Debug)]
struct Run {
    from: usize,
    to: usize,
    len: usize,
}

impl Runs {
    /// No runs yet, of a tensor whose bytes are verified in chunks of `chunk` bytes, if at all.
    pub(crate) fn new(stored: &Stored<'_>, chunk: Option<u64>) -> Self {
        let unit = unit(chunk) / stored.size;
        let elements = stored.len as usize / stored.size;
        let chunk = chunk.map_or(elements, |chunk| chunk as usize / stored.size);
        Self {
            unit,
            chunk,
            stored: elements,
            runs: Vec::new(),
        }
    }

    /// Adds all elements.
    pub(crate) fn push_all(&mut self) {
        self.push(0, 0, self.stored);
    }

    /// Adds the elements of a chunk, with destinations from 0 on; none if there is no such chunk.
    pub(crate) fn push_chunk(&mut self, number: usize) {
        let from = self.stored.min(number * self.chunk);
        let end = self.stored.min(from + self.chunk);
        self.push(from, 0, end - from);
    }

    /// Adds `len` elements starting at `from`, with destination `to`.
    pub(crate) fn push(&mut self, mut from: usize, mut to: usize, mut len: usize) {
        while len > 0 {
            let here = (self.unit - from % self.unit).min(len);
            self.runs.push(Run {
                from,
                to,
                len: here,
            });
            from += here;
            to += here;
            len -= here;
        }
    }

    /// Reads all runs and calls `copy` with the bytes of each and its destination element. With
    /// `chunks`, every chunk that a run touches is read in full and verified, unless it was
    /// verified before.
    ///
    /// # Errors
    /// The file cannot be read, or the hash of a chunk differs. Some runs may have been copied by
    /// then.
    pub(crate) fn read(
        mut self,
        stored: Stored<'_>,
        chunks: Option<Chunks<'_>>,
        mut copy: impl FnMut(&[u8], usize),
    ) -> Result<(), CheckpointError> {
        if self.runs.is_empty() {
            return Ok(());
        }
        self.runs.sort_unstable_by_key(|run| run.from);
        let mut buffer = vec![0; (unit(None) as u64).min(stored.len) as usize];
        let Some(chunks) = chunks else {
            return read_windows(stored, &self.runs, &mut buffer, &mut copy);
        };
        let chunk_of = |run: &Run| ((run.from * stored.size) as u64 / chunks.len) as usize;
        for runs in self.runs.chunk_by(|a, b| chunk_of(a) == chunk_of(b)) {
            let chunk = chunk_of(&runs[0]);
            if chunks.is_seen(chunk) {
                read_windows(stored, runs, &mut buffer, &mut copy)?
            } else {
                read_chunk(stored, (&chunks, chunk), runs, &mut buffer, &mut copy)?
            }
        }
        Ok(())
    }
}

/// Reads are split at multiples of this many bytes.
fn unit(chunk: Option<u64>) -> usize {
    chunk
        .and_then(|chunk| usize::try_from(chunk).ok())
        .map_or(BLOCK, |chunk| chunk.min(BLOCK))
}

/// Reads only the runs and the small gaps between them.
fn read_windows(
    stored: Stored<'_>,
    runs: &[Run],
    buffer: &mut [u8],
    copy: &mut impl FnMut(&[u8], usize),
) -> Result<(), CheckpointError> {
    let (size, block) = (stored.size, BLOCK / stored.size);
    let is_near = |a: &Run, b: &Run| {
        let gap = b.from.saturating_sub(a.from + a.len) * size;
        a.from / block == b.from / block && gap <= GAP
    };
    for window in runs.chunk_by(is_near) {
        let start = window[0].from;
        let end = window
            .iter()
            .map(|run| run.from + run.len)
            .max()
            .unwrap_or(start);
        let bytes = &mut buffer[..(end - start) * size];
        stored
            .file
            .read_at(bytes, stored.start + (start * size) as u64)?;
        for run in window {
            copy(
                &bytes[(run.from - start) * size..][..run.len * size],
                run.to,
            );
        }
    }
    Ok(())
}

/// Reads a full chunk, copies its runs and compares its hash.
fn read_chunk(
    stored: Stored<'_>,
    (chunks, chunk): (&Chunks<'_>, usize),
    runs: &[Run],
    buffer: &mut [u8],
    copy: &mut impl FnMut(&[u8], usize),
) -> Result<(), CheckpointError> {
    let size = stored.size;
    let start = chunk as u64 * chunks.len;
    let end = (start + chunks.len).min(stored.len);
    let mut hash = Xxh3::new();
    let mut rest = runs;
    for at in (start..end).step_by(unit(Some(chunks.len))) {
        let len = (end - at).min(unit(Some(chunks.len)) as u64) as usize;
        let bytes = &mut buffer[..len];
        stored.file.read_at(bytes, stored.start + at)?;
        hash.update(bytes);
        let first = at as usize / size;
        let here = rest.partition_point(|run| run.from < first + len / size);
        for run in &rest[..here] {
            copy(
                &bytes[(run.from - first) * size..][..run.len * size],
                run.to,
            );
        }
        rest = &rest[here..];
    }
    chunks.compare(chunk, start..end, hash.digest(), stored.file)
}

#[cfg(test)]
mod tests {
    use std::{fs, sync::atomic::AtomicBool};

    use proptest::prelude::*;
    use xxhash_rust::xxh3::xxh3_64;

    use super::*;
    use crate::{hex::hex, plain::PlainFile};

    proptest! {
        #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

        /// Any runs, with and without chunks, return the bytes of the file. A wrong byte in a chunk
        /// that a run touches is an error; one in another chunk is not noticed.
        #[test]
        fn runs_come_as_they_stand_and_a_wrong_byte_in_their_chunk_is_an_error(
            power in 10u32..22,
            size in prop::sample::select(vec![1usize, 2, 4, 8]),
            elements in 1usize..300_000,
            wanted in prop::collection::vec((any::<prop::sample::Index>(), 1usize..150_000), 0..6),
            wrong in any::<prop::sample::Index>(),
        ) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("f");
            let len = elements * size;
            let bytes: Vec<u8> = (0..len + 3).map(|i| (i.wrapping_mul(2_654_435_761) >> 7) as u8).collect();
            fs::write(&path, &bytes).unwrap();
            let file = PlainFile::open(&path).unwrap();
            let stored = Stored { file: &file, start: 3, len: len as u64, size };
            let chunk = 1u64 << power;
            let hashes: Vec<_> = bytes[3..].chunks(chunk as usize).map(|c| hex(xxh3_64(c))).collect();
            let seen: Vec<_> = hashes.iter().map(|_| AtomicBool::new(false)).collect();
            let chunks = |seen| Chunks { tensor: "w", len: chunk, hashes: &hashes, seen };
            let wanted: Vec<_> = wanted.iter().map(|(from, len)| {
                let from = from.index(elements);
                (from, (*len).min(elements - from))
            }).collect();
            let read = |chunks: Option<Chunks<'_>>| {
                let mut runs = Runs::new(&stored, chunks.as_ref().map(|chunks| chunks.len));
                let mut to = 0;
                for (from, len) in &wanted {
                    runs.push(*from, to, *len);
                    to += len;
                }
                let mut found = vec![0; to * size];
                let copy = |bytes: &[u8], to: usize| found[to * size..][..bytes.len()].copy_from_slice(bytes);
                runs.read(stored, chunks, copy).map(|()| found)
            };
            let expected: Vec<u8> = wanted.iter().flat_map(|(from, len)| bytes[3 + from * size..][..len * size].to_vec()).collect();
            prop_assert!(read(None).unwrap() == expected);
            prop_assert!(read(Some(chunks(&seen))).unwrap() == expected);
            prop_assert!(read(Some(chunks(&seen))).unwrap() == expected, "again, when they were seen");

            let at = wrong.index(len);
            let mut changed = bytes.clone();
            changed[3 + at] ^= 4;
            fs::write(&path, &changed).unwrap();
            let fresh: Vec<_> = hashes.iter().map(|_| AtomicBool::new(false)).collect();
            let chunk_of = |element: usize| (element * size) as u64 / chunk;
            let is_touched = wanted.iter().any(|(from, len)| {
                (chunk_of(*from)..=chunk_of(from + len - 1)).contains(&(at as u64 / chunk))
            });
            match read(Some(chunks(&fresh))) {
                Ok(found) => prop_assert!(!is_touched && found == expected),
                Err(error) => {
                    let named = format!("tensor `w` (chunk {} of {}", at as u64 / chunk, hashes.len());
                    prop_assert!(is_touched && error.is_damage(), "{error}");
                    prop_assert!(error.to_string().contains(&named), "{error}");
                }
            }
        }
    }
}
