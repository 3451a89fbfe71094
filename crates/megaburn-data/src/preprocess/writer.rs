//! Writes encoded records into data sets.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{
    encode::{Document, Encoded, EncodedBatch, EncodedContent, EncodedPiece, EncodedText},
    event::{PreprocessCounts, PreprocessEvent},
    inputs::Inputs,
    records::Position,
};
use crate::{error::DataError, part::Part, text_hash::TextHash};

/// What the journal saves.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Progress {
    pub(super) position: Position,
    pub(super) counts: PreprocessCounts,
    /// Tokens of a document whose other pieces are missing.
    #[serde(default)]
    open_tokens: u64,
    /// Bytes of text of each data set; `None` if a version wrote it that did not count them.
    #[serde(default)]
    pub(super) text_bytes: Option<Vec<u64>>,
}

impl Progress {
    /// What a journal saved; that of a beginning if there is nothing.
    pub(super) fn of(saved: Option<&Value>) -> Self {
        let saved = saved
            .cloned()
            .and_then(|saved| serde_json::from_value(saved).ok());
        saved.unwrap_or_default()
    }
}

/// Writes records in order.
pub(super) struct Writer<'a> {
    pub(super) part: Part,
    pub(super) progress: Progress,
    /// The hash of the documents, if it is asked for.
    pub(super) hash: Option<TextHash>,
    inputs: &'a Inputs,
    skip_bad: bool,
    /// The token that ends a document, as bytes.
    end: Option<Vec<u8>>,
    /// The last record that was skipped.
    last_skipped: String,
}

/// All documents that were written.
pub(super) struct Finished {
    pub(super) part: Part,
    pub(super) progress: Progress,
    /// The hash of the documents, if it was asked for.
    pub(super) hash: Option<u64>,
}

impl<'a> Writer<'a> {
    /// Continues a part. `end` is the token that ends a document.
    pub(super) fn new(
        mut part: Part,
        inputs: &'a Inputs,
        skip_bad: bool,
        end: Option<Vec<u8>>,
    ) -> Self {
        let mut progress = Progress::of(part.progress());
        if part.progress().is_none() {
            progress.text_bytes = Some(vec![0; part.outputs().len()]);
        }
        Self {
            progress,
            part,
            hash: None,
            inputs,
            skip_bad,
            end,
            last_skipped: "an earlier process read it".into(),
        }
    }

    /// Writes the documents of a batch.
    ///
    /// # Errors
    /// A record is bad and is not to be skipped, or a file cannot be written.
    pub(super) fn add(
        &mut self,
        batch: EncodedBatch,
        on_event: &mut dyn FnMut(PreprocessEvent),
    ) -> Result<(), DataError> {
        for Encoded { file, content } in batch.records {
            match content {
                EncodedContent::Documents(Ok(documents)) => self.add_documents(&documents)?,
                EncodedContent::Piece(Ok(piece)) => self.add_piece(&piece)?,
                EncodedContent::Piece(Err(why)) => {
                    let path = self.inputs.files[file].path.clone();
                    return Err(DataError::BadPiece { path, why });
                }
                EncodedContent::Documents(Err(why)) => {
                    let path = &self.inputs.files[file].path;
                    let record = format!("data file `{}`{why}", path.display());
                    if !self.skip_bad {
                        return Err(DataError::BadRecord { record });
                    }
                    self.progress.counts.skipped += 1;
                    self.last_skipped.clone_from(&record);
                    on_event(PreprocessEvent::Skipped(record));
                }
            }
        }
        self.progress.position = batch.end;
        Ok(())
    }

    fn add_documents(&mut self, documents: &[Document]) -> Result<(), DataError> {
        for (index, document) in documents.iter().enumerate() {
            self.add_text(index, &document.text, true);
        }
        let counts = &mut self.progress.counts;
        counts.documents += 1;
        for (document, output) in documents.iter().zip(self.part.outputs()) {
            output.add_document(&document.bytes, &document.lengths)?;
            let lengths = document.lengths.iter();
            counts.tokens += lengths
                .map(|length| u64::from(length.unsigned_abs()))
                .sum::<u64>();
            counts.empty += u64::from(document.lengths.is_empty());
        }
        Ok(())
    }

    /// Adds a piece of a document. Only one field is read of texts with pieces.
    fn add_piece(&mut self, piece: &EncodedPiece) -> Result<(), DataError> {
        self.add_text(0, &piece.text, piece.is_last);
        let counts = &mut self.progress.counts;
        let open = &mut self.progress.open_tokens;
        for output in self.part.outputs() {
            output.add_tokens(&piece.bytes)?;
            counts.tokens += piece.num_tokens;
            *open += piece.num_tokens;
            if !piece.is_last {
                continue;
            }
            if *open > 0
                && let Some(end) = &self.end
            {
                output.add_tokens(end)?;
                counts.tokens += 1;
                *open += 1;
            }
            counts.documents += 1;
            counts.empty += u64::from(*open == 0);
            for length in lengths_of(std::mem::take(open)) {
                output.add_length(length)?;
            }
            output.end_document(output.num_sequences())?;
        }
        Ok(())
    }

    /// Counts the text of a document, or of a piece of one.
    fn add_text(&mut self, index: usize, text: &EncodedText, is_last: bool) {
        let counts = self.progress.text_bytes.as_mut();
        if let Some(count) = counts.and_then(|counts| counts.get_mut(index)) {
            *count += text.num_bytes;
        }
        if let Some(hash) = &mut self.hash {
            hash.add(&text.text);
            if is_last {
                hash.end_document();
            }
        }
    }

    /// Saves the state, from which a later process continues.
    pub(super) fn save(&mut self) -> Result<(), DataError> {
        self.part.save(json!(self.progress))
    }

    /// What was written, unless it is nothing because all records were skipped.
    pub(super) fn finish(self) -> Result<Finished, DataError> {
        let PreprocessCounts {
            skipped, documents, ..
        } = self.progress.counts;
        if skipped > 0 && documents == 0 {
            self.part.discard();
            return Err(DataError::AllSkipped {
                num_skipped: skipped,
                record: self.last_skipped,
            });
        }
        Ok(Finished {
            part: self.part,
            progress: self.progress,
            hash: self.hash.map(|hash| hash.digest()),
        })
    }
}

/// The lengths of the sequences of a document: one, or several if the index cannot hold its length.
fn lengths_of(num_tokens: u64) -> impl Iterator<Item = i32> {
    let most = i32::MAX as u64;
    let full = std::iter::repeat_n(i32::MAX, (num_tokens / most) as usize);
    let rest = (num_tokens % most) as i32;
    full.chain((rest > 0).then_some(rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_document_that_no_index_can_hold_has_several_sequences() {
        let lengths = |count| lengths_of(count).collect::<Vec<_>>();
        assert_eq!(lengths(0), [0; 0]);
        assert_eq!(lengths(7), [7]);
        assert_eq!(lengths(i32::MAX as u64), [i32::MAX]);
        assert_eq!(lengths(5 + 2 * i32::MAX as u64), [i32::MAX, i32::MAX, 5]);
    }

    #[test]
    fn states_of_earlier_versions_are_read() {
        let saved = json!({
            "position": {"file": 1, "bytes": 2, "records": 3},
            "counts": {"documents": 4, "tokens": 5, "empty": 6, "skipped": 7},
        });
        let progress = Progress::of(Some(&saved));
        assert_eq!((progress.position.file, progress.counts.tokens), (1, 5));
        assert_eq!((progress.open_tokens, progress.text_bytes), (0, None));
    }
}
