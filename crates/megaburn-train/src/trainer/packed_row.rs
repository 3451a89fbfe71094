//! Sequences as the host has them.

/// The label that the loss leaves out, as PyTorch's and Hugging Face's.
pub(super) const IGNORED: i64 = -100;

/// Tokens that see each other, and what each is asked for.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Document {
    pub(super) tokens: Vec<i64>,
    pub(super) labels: Vec<i64>,
}

/// Documents one behind the other, each padded.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct PackedRow {
    pub(super) tokens: Vec<i64>,
    pub(super) labels: Vec<i64>,
    /// Where documents begin, and where the last ends.
    pub(super) bounds: Vec<usize>,
    /// How long documents are, without what they are padded with.
    pub(super) lens: Vec<usize>,
}

impl Document {
    /// Of one token more, which is what the last one is asked for.
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

    /// The same, asked for nothing.
    pub(super) fn ignored(mut self) -> Self {
        self.labels.fill(IGNORED);
        self
    }

    pub(super) fn cut(mut self, len: usize) -> Self {
        self.tokens.truncate(len);
        self.labels.truncate(len);
        self
    }
}

impl PackedRow {
    /// Puts a document behind the others, padded to `len`.
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

    /// The last document has what room is left up to `end`.
    pub(super) fn fill(mut self, end: usize) -> Self {
        match self.bounds.len() {
            0 | 1 => self.bounds = vec![0, end],
            last => self.bounds[last - 1] = end,
        }
        self.pad(end);
        self
    }
}
