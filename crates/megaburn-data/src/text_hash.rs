//! A hash of documents.

use xxhash_rust::xxh3::Xxh3;

/// The xxh3 hash of all documents that are not empty, each followed by the byte 0xFF, which never
/// occurs in UTF-8.
#[derive(Clone, Default)]
pub(crate) struct TextHash {
    hash: Xxh3,
    is_inside: bool,
}

impl TextHash {
    /// Adds a part of a document.
    pub(crate) fn add(&mut self, text: &[u8]) {
        self.hash.update(text);
        self.is_inside |= !text.is_empty();
    }

    pub(crate) fn end_document(&mut self) {
        if std::mem::take(&mut self.is_inside) {
            self.hash.update(&[0xFF]);
        }
    }

    pub(crate) fn digest(&self) -> u64 {
        self.hash.digest()
    }
}
