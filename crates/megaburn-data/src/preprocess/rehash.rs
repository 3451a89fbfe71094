//! Hashes again what an earlier process has written: the state of a hash cannot be saved.

use std::io::Read;
use std::ops::ControlFlow;
use std::sync::Arc;

use super::{
    inputs::{InputFile, Kind},
    keys::texts_of,
    records::{Position, Record, read_batches},
    unpack,
};
use crate::{error::DataError, text_hash::TextHash};

/// Bytes that are read at a time.
const BLOCK: usize = 1 << 16;

/// The hash of the documents of one field before a position.
///
/// # Errors
/// A file cannot be read.
pub(super) fn hash_before(
    files: &[InputFile],
    keys: &[String],
    end: Position,
    batch_bytes: usize,
) -> Result<TextHash, DataError> {
    let mut hash = TextHash::default();
    let is_before = |record: &Record| {
        record.file < end.file || record.file == end.file && record.number <= end.records
    };
    // A text that was begun is hashed as it is.
    let begun = files.get(end.file);
    let begun = begun.filter(|file| file.kind == Kind::Text && end.bytes > 0);
    let files = match begun {
        Some(_) => &files[..end.file],
        None => files,
    };
    let start = Position::default();
    read_batches(files, keys, None, start, batch_bytes, &mut |batch| {
        for record in &batch.records {
            if !is_before(record) {
                return ControlFlow::Break(());
            }
            // Bad records were skipped.
            let _ = texts_of(&record.content, keys, |documents| {
                documents
                    .iter()
                    .flatten()
                    .for_each(|text| hash.add(text.as_bytes()));
                hash.end_document();
                Ok(())
            });
        }
        ControlFlow::Continue(())
    })?;
    if let Some(file) = begun {
        let failed = |source| DataError::Io {
            path: file.path.clone(),
            source,
        };
        let text = unpack::open(&file.path, file.packing, 0, &Arc::default());
        let mut text = text.map_err(failed)?.take(end.bytes);
        let mut block = vec![0; BLOCK];
        loop {
            let count = text.read(&mut block).map_err(failed)?;
            if count == 0 {
                break;
            }
            hash.add(&block[..count]);
        }
    }
    Ok(hash)
}
