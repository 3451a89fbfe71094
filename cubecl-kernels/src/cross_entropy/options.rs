/// The vocabulary, the part of the logits' columns that is here, and options of the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrossEntropyOptions {
    /// Tokens of the vocabulary. Columns after them are padding, which is ignored.
    pub vocab: usize,
    /// The index, from 0, of this part among the equal parts of the columns.
    pub part: usize,
    /// Share of the target's probability that is spread evenly over the full vocabulary, including
    /// the target.
    pub smoothing: f64,
    /// Factor of the squared logarithm of the sum of exponentials, which is added to each loss
    /// (the z-loss of PaLM: Chowdhery et al., 2022, section 5).
    pub z_loss: f64,
    /// The logits become `cap * tanh(logit / cap)` before the softmax (Gemma 2).
    pub soft_cap: Option<f64>,
    /// Labels with this value are ignored.
    pub ignore_index: i64,
}

impl CrossEntropyOptions {
    /// All columns in one part, neither smoothing, z-loss nor soft cap, and -100 ignored.
    pub fn new(vocab: usize) -> Self {
        Self {
            vocab,
            part: 0,
            smoothing: 0.0,
            z_loss: 0.0,
            soft_cap: None,
            ignore_index: -100,
        }
    }

    /// The number of columns of a part that belong to tokens.
    pub(super) fn tokens_of(&self, part: usize, columns: usize) -> usize {
        self.vocab.saturating_sub(part * columns).min(columns)
    }

    /// The token of the first column.
    pub(super) fn first(&self, columns: usize) -> usize {
        self.part * columns
    }

    /// The target probability of the label's token, in addition to [`on_each`](Self::on_each).
    pub(super) fn on_target(&self) -> f64 {
        1.0 - self.smoothing
    }

    /// The target probability of every token.
    pub(super) fn on_each(&self) -> f64 {
        self.smoothing / self.vocab as f64
    }

    /// Panics unless the options fit logits `[s, b, columns]` and labels of shape `labels`.
    pub(super) fn check(&self, name: &str, [s, b, columns]: [usize; 3], labels: [usize; 2]) {
        let Self {
            vocab,
            part,
            smoothing,
            z_loss,
            soft_cap,
            ignore_index,
        } = *self;
        assert_eq!(
            labels,
            [s, b],
            "{name}: labels must be [s, b] of logits [{s}, {b}, {columns}]"
        );
        assert!(
            s * b > 0,
            "{name}: logits are [{s}, {b}, {columns}] and have no tokens"
        );
        // Kernels count tokens in 32 bits.
        let most = i32::MAX as usize;
        assert!(
            (1..=most).contains(&vocab),
            "{name}: vocabulary size {vocab} is out of range"
        );
        assert!(
            columns > 0 && part.saturating_mul(columns) <= most,
            "{name}: shard {part} of {columns} columns is out of range"
        );
        let ignored = i32::try_from(ignore_index);
        assert!(
            ignored.is_ok(),
            "{name}: ignore_index {ignore_index} does not fit in 32 bits"
        );
        assert!(
            z_loss >= 0.0 && z_loss.is_finite(),
            "{name}: z_loss {z_loss} must be at least 0 and finite"
        );
        assert!(
            soft_cap.is_none_or(|cap| cap > 0.0 && cap.is_finite()),
            "{name}: soft_cap {soft_cap:?} must be positive and finite"
        );
        // Rounding may make the target's probability slightly negative.
        let target = self.on_target() + self.on_each();
        assert!(
            smoothing >= 0.0 && target >= -1e-9,
            "{name}: smoothing {smoothing} is negative, or makes the target's probability \
            {target} negative"
        );
    }
}
