//! Encodes batches of records on several threads, in order and with bounded memory.

use std::ops::ControlFlow;
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::thread;

use rayon::{ThreadPool, ThreadPoolBuilder};

use super::{
    budget::{Budget, Reserved, longest_word},
    inputs::InputFile,
    keys::texts_of,
    records::{Batch, Content, Piece, Position, Record, read_batches},
    sentences::sentences_of,
};
use crate::{
    error::DataError,
    indexed::TokenType,
    tokenizer::{PieceEncoder, Tokenizer},
};

/// Bytes of memory that encoding may need in any case.
const LEAST_BUDGET: usize = 1 << 28;
/// Bytes of memory that a batch needs per byte of text, until it is written: its lines, ids and
/// tokens.
const BATCH_MEMORY: usize = 8;

/// What is done with a text.
#[derive(Clone, Copy, Debug)]
pub(super) struct Encoder<'a> {
    pub(super) tokenizer: &'a dyn Tokenizer,
    /// Encodes long texts piece by piece, if it can.
    pub(super) pieces: Option<&'a dyn PieceEncoder>,
    pub(super) keys: &'a [String],
    pub(super) append_eod: bool,
    /// Whether special tokens are ordinary text, and none are added.
    pub(super) plain_text: bool,
    /// Whether each text is divided into its sentences.
    pub(super) split_sentences: bool,
    pub(super) token_type: TokenType,
    /// Whether to keep the texts until they are written.
    pub(super) keep_text: bool,
}

/// The document of a key: the bytes of its tokens, and the lengths of its sequences.
#[derive(Debug)]
pub(super) struct Document {
    pub(super) bytes: Vec<u8>,
    pub(super) lengths: Vec<i32>,
    pub(super) text: EncodedText,
}

/// What is known of a text that was encoded.
#[derive(Debug, Default)]
pub(super) struct EncodedText {
    pub(super) num_bytes: u64,
    /// The text, if it was to be kept.
    pub(super) text: Vec<u8>,
}

/// The tokens of a piece of a document.
#[derive(Debug)]
pub(super) struct EncodedPiece {
    pub(super) bytes: Vec<u8>,
    pub(super) num_tokens: u64,
    pub(super) text: EncodedText,
    pub(super) is_last: bool,
}

/// A record of a file, or its place and what is wrong with it.
#[derive(Debug)]
pub(super) struct Encoded {
    pub(super) file: usize,
    pub(super) content: EncodedContent,
}

#[derive(Debug)]
pub(super) enum EncodedContent {
    /// The documents of the keys.
    Documents(Result<Vec<Document>, String>),
    Piece(Result<EncodedPiece, String>),
}

/// A batch of records whose texts are encoded.
#[derive(Debug)]
pub(super) struct EncodedBatch {
    pub(super) records: Vec<Encoded>,
    pub(super) end: Position,
    pub(super) read_bytes: u64,
    /// Keeps its share of the memory.
    _reserved: Reserved,
}

impl Encoder<'_> {
    /// Reads files from `start` on and gives each encoded batch to `take`, in order.
    ///
    /// # Errors
    /// A file cannot be read, or `take` fails.
    pub(super) fn run(
        self,
        files: &[InputFile],
        start: Position,
        num_workers: usize,
        batch_bytes: usize,
        mut take: impl FnMut(EncodedBatch) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let pool = ThreadPoolBuilder::new().num_threads(num_workers).build();
        let pool = pool.map_err(|error| DataError::Workers {
            num_workers,
            why: error.to_string(),
        })?;
        // Batches that wait for a worker or for being written.
        let num_waiting = 2 * num_workers + 2;
        let (send, queue) = sync_channel(num_waiting);
        let least = 2 * num_waiting * batch_bytes * BATCH_MEMORY;
        let budget = Budget::new(least.max(LEAST_BUDGET));
        thread::scope(|scope| {
            scope.spawn(|| self.feed(&pool, files, start, batch_bytes, &budget, send));
            for next in queue {
                // A worker that panics ends its channel; the panic continues when the pool is left.
                let Ok(batch) = next?.recv() else { break };
                take(batch)?;
            }
            Ok(())
        })
    }

    /// Reads batches, has each encoded by the pool, and sends where its result will be.
    fn feed(
        self,
        pool: &ThreadPool,
        files: &[InputFile],
        start: Position,
        batch_bytes: usize,
        budget: &Budget,
        send: SyncSender<Result<Receiver<EncodedBatch>, DataError>>,
    ) {
        pool.in_place_scope(|scope| {
            let (keys, pieces) = (self.keys, self.pieces);
            let read = read_batches(files, keys, pieces, start, batch_bytes, &mut |batch| {
                // Until the batch is written, or is dropped because the writer failed.
                let reserved = budget.reserve(self.memory_of(&batch));
                let (done, result) = channel();
                if send.send(Ok(result)).is_err() {
                    return ControlFlow::Break(());
                }
                scope.spawn(move |_| {
                    // The receiver is gone if the writer failed.
                    let _ = done.send(self.batch(batch, reserved));
                });
                ControlFlow::Continue(())
            });
            if let Err(error) = read {
                let _ = send.send(Err(error));
            }
        });
    }

    /// Bytes of memory that a batch needs, approximately. Its texts are encoded one after another.
    fn memory_of(self, batch: &Batch) -> usize {
        let of = |record: &Record| {
            let texts = record.content.texts().into_iter();
            let of = |text: &[u8]| {
                let longest_word = longest_word(text);
                self.tokenizer.encoding_memory(text.len(), longest_word)
            };
            texts.map(of).max().unwrap_or(0)
        };
        BATCH_MEMORY * batch.num_bytes + batch.records.iter().map(of).max().unwrap_or(0)
    }

    fn batch(self, batch: Batch, reserved: Reserved) -> EncodedBatch {
        let encoded = batch.records.into_iter().map(|record| self.record(record));
        EncodedBatch {
            records: encoded.collect(),
            end: batch.end,
            read_bytes: batch.read_bytes,
            _reserved: reserved,
        }
    }

    fn record(self, record: Record) -> Encoded {
        let Record {
            file,
            number,
            content,
        } = record;
        if let (Content::Piece(piece), Some(pieces)) = (&content, self.pieces) {
            let piece = self.piece(piece, pieces).map_err(|why| format!(": {why}"));
            let content = EncodedContent::Piece(piece);
            return Encoded { file, content };
        }
        let documents = self.documents(&content).map_err(|why| match content {
            Content::Line(_) => format!(", line {number}: {why}"),
            Content::Element(_) => format!(", element {number}: {why}"),
            Content::Text(_) | Content::Piece(_) | Content::NotUtf8(_) => format!(": {why}"),
            #[cfg(feature = "parquet")]
            Content::Row(_) => format!(", row {number}: {why}"),
        });
        let content = EncodedContent::Documents(documents);
        Encoded { file, content }
    }

    fn piece(self, piece: &Piece, pieces: &dyn PieceEncoder) -> Result<EncodedPiece, String> {
        let ids = pieces.encode(&piece.text, piece.is_first, piece.is_last);
        let ids = ids.map_err(|error| error.to_string())?;
        Ok(EncodedPiece {
            bytes: self.token_type.bytes_of(&ids),
            num_tokens: ids.len() as u64,
            text: self.text(&[&piece.text]),
            is_last: piece.is_last,
        })
    }

    fn text(self, texts: &[&str]) -> EncodedText {
        EncodedText {
            num_bytes: texts.iter().map(|text| text.len() as u64).sum(),
            text: match self.keep_text {
                true => texts.concat().into_bytes(),
                false => Vec::new(),
            },
        }
    }

    fn documents(self, content: &Content) -> Result<Vec<Document>, String> {
        texts_of(content, self.keys, |texts| {
            texts.iter().map(|texts| self.document(texts)).collect()
        })
    }

    /// As Megatron-LM's `Encoder.encode`: sequences without tokens are left out, and the token that
    /// ends a document belongs to its last sequence. A document without tokens has no end either.
    fn document(self, texts: &[&str]) -> Result<Document, String> {
        let sentences: Vec<&str>;
        let sequences = match self.split_sentences {
            true => {
                sentences = texts.iter().flat_map(|text| sentences_of(text)).collect();
                &sentences
            }
            false => texts,
        };
        let ids = match self.plain_text {
            true => self.tokenizer.encode_batch(sequences),
            false => self.tokenizer.encode_prompts(sequences),
        };
        let ids = ids.map_err(|error| error.to_string())?;
        let mut document = Document {
            bytes: Vec::new(),
            lengths: Vec::new(),
            text: self.text(texts),
        };
        let last = ids.iter().rposition(|ids| !ids.is_empty());
        for (index, mut ids) in ids.into_iter().enumerate() {
            if self.append_eod && Some(index) == last {
                ids.push(self.tokenizer.eos());
            }
            if ids.is_empty() {
                continue;
            }
            let length = i32::try_from(ids.len()).map_err(|_| {
                format!(
                    "{} tokens, more than the index of a data set can count",
                    ids.len()
                )
            })?;
            document.lengths.push(length);
            document.bytes.extend(self.token_type.bytes_of(&ids));
        }
        Ok(document)
    }
}
