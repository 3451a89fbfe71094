//! Packed sequences on the host.

/// The label that is excluded from the loss, as in PyTorch and Hugging Face.
pub(super) const IGNORED: i64 = -100;

/// Tokens that attend to each other, and the label of each.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Document {
    pub(super) tokens: Vec<i64>,
    pub(super) labels: Vec<i64>,
}

/// Documents packed one after another, each padded.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct PackedRow {
    pub(super) tokens: Vec<i64>,
    pub(super) labels: Vec<i64>,
    /// The start of each document, and the end of the last one.
    pub(super) bounds: Vec<usize>,
    /// Lengths of the documents without padding.
    pub(super) lens: Vec<usize>,
    /// What an encoder reads besides; `None` in rows of a decoder.
    pub(super) encoded: Option<Encoded>,
}

/// The inputs of an encoder besides tokens and labels.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Encoded {
    /// The token types.
    pub(super) types: Vec<usize>,
    /// The label of the binary head: 1 if the segments are in the wrong order.
    pub(super) order: i64,
}

impl Document {
    /// From n+1 tokens: n inputs and their n next-token labels.
    pub(super) fn of(tokens: &[u32]) -> Self {
        let ids = |tokens: &[u32]| tokens.iter().map(|token| i64::from(*token)).collect();
        let last = tokens.len().saturating_sub(1);
        Self {
            tokens: ids(&tokens[..last]),
            labels: ids(&tokens[tokens.len().min(1)..]),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// The document with all labels excluded from the loss.
    pub(super) fn ignored(mut self) -> Self {
        self.labels.fill(IGNORED);
        self
    }

    /// Excludes the label of each `eos` among the inputs from the loss (Megatron-LM's
    /// `--eod-mask-loss`): it is the first token of the next document, which cannot be predicted.
    pub(super) fn ignore_after(&mut self, eos: u32) {
        for (token, label) in self.tokens.iter().zip(&mut self.labels) {
            if *token == i64::from(eos) {
                *label = IGNORED;
            }
        }
    }

    pub(super) fn cut(mut self, len: usize) -> Self {
        self.tokens.truncate(len);
        self.labels.truncate(len);
        self
    }
}

impl PackedRow {
    /// Appends a document, padded to `len`.
    pub(super) fn put(&mut self, document: Document, len: usize) {
        if self.bounds.is_empty() {
            self.bounds.push(0);
        }
        self.lens.push(document.len());
        self.tokens.extend(document.tokens);
        self.labels.extend(document.labels);
        let end = self.bounds[self.bounds.len() - 1] + len;
        self.bounds.push(end);
        self.pad(end);
    }

    fn pad(&mut self, end: usize) {
        self.tokens.resize(end, 0);
        self.labels.resize(end, IGNORED);
    }

    /// Pads the row to `end`; the padding belongs to the last document.
    pub(super) fn fill(mut self, end: usize) -> Self {
        match self.bounds.len() {
            0 | 1 => self.bounds = vec![0, end],
            last => self.bounds[last - 1] = end,
        }
        self.pad(end);
        self
    }
}
