//! The format of `torch.save` before PyTorch 1.6: pickles one after the other, then the storages.

use std::collections::HashMap;

use crate::dtype::DType;
use crate::error::TorchError;
use crate::file_range::FileRange;
use crate::pickle::{Kind, Pickle, PickleError, Value};
use crate::pt::tensor::Storage;

/// What the first pickle is: the integer 0x1950a86a20f9469cfc6c.
const MAGIC: [u8; 10] = [0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19];

/// The number of bytes that are read first.
const FIRST_LEN: u64 = 1 << 16;

/// The most bytes of the pickles.
const MOST_BYTES: u64 = 1 << 30;

/// Whether a file begins like one of this format.
pub(super) fn is_legacy(range: &FileRange) -> Result<bool, TorchError> {
    let mut start = vec![0; range.len().min(32) as usize];
    range.fill(&mut start, 0)?;
    let first = Pickle::read_first(&start).ok();
    Ok(first.is_some_and(
        |(pickle, _)| matches!(pickle.root().kind(), Kind::BigInt(digits) if digits == MAGIC),
    ))
}

/// Reads what was saved, and where the storages of the file are.
pub(super) fn open(range: &FileRange) -> Result<(Pickle, HashMap<String, FileRange>), TorchError> {
    let mut len = FIRST_LEN;
    let (pickles, mut at) = loop {
        let read = len.min(range.len());
        let mut bytes = vec![0; read as usize];
        range.fill(&mut bytes, 0)?;
        match pickles(&bytes) {
            Ok(found) => break found,
            // The pickles are longer than what was read.
            Err(error) if error.is_truncated() && read < range.len() && len < MOST_BYTES => {
                len *= 4;
            }
            Err(source) => {
                return Err(TorchError::Pickle {
                    path: range.path(),
                    entry: String::new(),
                    source,
                });
            }
        }
    };
    let [_, _, system, pickle, keys] = pickles;
    let is_little = system
        .root()
        .get("little_endian")
        .and_then(|value| value.as_bool());
    if is_little == Some(false) {
        return Err(TorchError::BigEndian { path: range.path() });
    }
    let mut types: HashMap<&str, Option<DType>> = HashMap::new();
    for reference in pickle.persistent() {
        // A whole module refers to the source of its class too.
        if !is_storage(reference) {
            continue;
        }
        let storage = Storage::of(reference);
        let storage = storage.map_err(|why| range.damaged(why))?;
        types.insert(storage.key, storage.dtype);
    }
    let keys = keys.root();
    let listed = keys.sequence();
    let listed = listed.ok_or_else(|| range.damaged(format!("its list of storages is {keys}")))?;
    let mut storages = HashMap::new();
    for key in listed.iter() {
        let cut = |why: &str| range.damaged(format!("its storage {key} {why}"));
        let name = key.as_str().ok_or_else(|| cut("has no name"))?;
        let dtype = *types.get(name).ok_or_else(|| cut("has no type"))?;
        let mut count = [0; 8];
        range.fill(&mut count, at)?;
        let num_bytes = dtype.map_or(1, DType::num_bytes) as u64;
        let len = u64::from_le_bytes(count).checked_mul(num_bytes);
        let start = at + 8;
        let end = len.and_then(|len| start.checked_add(len));
        let end = end.ok_or_else(|| cut("has no valid length"))?;
        let storage = range.part(start..end);
        storages.insert(name.into(), storage.ok_or_else(|| cut("is cut off"))?);
        at = end;
    }
    drop(types);
    Ok((pickle, storages))
}

fn is_storage(reference: Value) -> bool {
    let Kind::Persistent(id) = reference.kind() else {
        return false;
    };
    let kind = id.sequence().and_then(|parts| parts.get(0)?.as_str());
    kind == Some("storage")
}

/// The five pickles that a file begins with, and where they end.
fn pickles(bytes: &[u8]) -> Result<([Pickle; 5], u64), PickleError> {
    let mut at = 0;
    let mut next = || {
        let (pickle, len) = Pickle::read_first(&bytes[at..])?;
        at += len;
        Ok(pickle)
    };
    let found = [next()?, next()?, next()?, next()?, next()?];
    Ok((found, at as u64))
}
