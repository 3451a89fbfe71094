use std::io::Read;
use std::path::Path;

use serde_json::{Value, json};

use super::{IndexedDataset, bytes::read_error};
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
/// The data sets have different tokenizers or types of tokens, or one of them is damaged. `out`
/// exists, and `force` is not set or another program wrote it. A file cannot be read or written.
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
    let text_bytes: Option<u64> = sets.iter().map(IndexedDataset::num_text_bytes).sum();
    let mut description = json!({"command": "merge", "from": from, "tokenizer": tokenizer(sets)?});
    if let Some(text_bytes) = text_bytes {
        description["text_bytes"] = text_bytes.into();
    }
    let sources = sets.iter().map(IndexedDataset::identity);
    let sources = sources.collect::<Result<Vec<_>, _>>()?;
    let identity = json!({"command": "merge", "sources": sources});
    let outputs = [(out.to_path_buf(), first.token_type())];
    let complete = match Part::open(out, &outputs, identity, force)? {
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

/// The tokenizer that all data sets were written with; null if one of them does not name it.
fn tokenizer(sets: &[IndexedDataset]) -> Result<Value, DataError> {
    let of = |set: &IndexedDataset| set.description().map(|d| d["tokenizer"].clone());
    let all: Vec<Value> = sets.iter().map(|set| of(set).unwrap_or_default()).collect();
    let mut known = sets.iter().zip(&all).filter(|(_, name)| !name.is_null());
    let Some((first, name)) = known.next() else {
        return Ok(Value::Null);
    };
    if let Some((other, _)) = known.find(|(_, other)| *other != name) {
        return Err(DataError::OtherTokenizer {
            prefixes: [first.prefix().into(), other.prefix().into()],
        });
    }
    Ok(match all.contains(&Value::Null) {
        true => Value::Null,
        false => name.clone(),
    })
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
        let path = || super::with_ending(from.prefix(), ".bin");
        read.map_err(|source| read_error(path(), source))?;
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
