use std::io::Read;
use std::path::Path;

use serde_json::json;

use super::IndexedDataset;
use crate::{
    error::DataError,
    part::{Opened, Output, Part},
};

/// Bytes of tokens that are copied at a time.
const CHUNK: usize = 1 << 20;

/// Writes the documents of several data sets, one after another, as the data set `out`. The files
/// are those of Megatron-LM's `tools/merge_datasets.py`.
///
/// # Errors
/// The data sets have tokens of different types, or one of them is damaged. `out` exists, and
/// `force` is not set or another program wrote it. A file cannot be read or written.
pub fn merge(sets: &[IndexedDataset], out: &Path, force: bool) -> Result<(), DataError> {
    let Some(first) = sets.first() else {
        return Err(DataError::Zero {
            what: "the number of data sets",
        });
    };
    for set in sets {
        if set.token_type() != first.token_type() {
            return Err(DataError::OtherType {
                prefixes: [first.prefix().into(), set.prefix().into()],
                types: [first.token_type().name(), set.token_type().name()],
            });
        }
        set.check()?;
    }
    let name = |set: &IndexedDataset| set.prefix().display().to_string();
    let source = |set| json!({"path": name(set), "documents": set.num_documents()});
    let from: Vec<_> = sets.iter().map(source).collect();
    let description = json!({"command": "merge", "from": from});
    let outputs = [(out.to_path_buf(), first.token_type())];
    let complete = match Part::open(out, &outputs, description.clone(), force)? {
        Opened::Complete(part) => part,
        Opened::Writing(mut part) => {
            for set in sets {
                copy(set, 0..set.num_documents(), &mut part.outputs()[0])?;
            }
            part.complete(json!(null), |_| description.clone())?
        }
    };
    complete.commit()
}

/// Adds a range of the documents of `from` to an output.
pub(super) fn copy(
    from: &IndexedDataset,
    documents: std::ops::Range<u64>,
    to: &mut Output,
) -> Result<(), DataError> {
    let first = from.sequences_before(documents.start)?;
    let last = from.sequences_before(documents.end)?;
    let (begin, end) = (from.bytes_before(first)?, from.bytes_before(last)?);
    let mut tokens = from.token_bytes(begin, end);
    let mut left = end.saturating_sub(begin);
    let mut chunk = vec![0; CHUNK];
    while left > 0 {
        let wanted = CHUNK.min(usize::try_from(left).unwrap_or(CHUNK));
        let read = tokens.read_exact(&mut chunk[..wanted]);
        read.map_err(|source| DataError::Io {
            path: super::with_ending(from.prefix(), ".bin"),
            source,
        })?;
        to.add_tokens(&chunk[..wanted])?;
        left -= wanted as u64;
    }
    let before = to.num_sequences();
    for length in from.lengths_from(first).take((last - first) as usize) {
        to.add_length(length?)?;
    }
    let count = (documents.end - documents.start) as usize;
    for end in from.document_ends_from(documents.start).take(count) {
        to.end_document(before + (end? as u64 - first))?;
    }
    Ok(())
}
