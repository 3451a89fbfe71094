/// What is predicted, and which columns of the logits are here.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrossEntropyOptions {
    /// Tokens of the vocabulary. Columns behind them are padding and take no part.
    pub vocab: usize,
    /// Which of the equal parts of the columns is here, from 0.
    pub part: usize,
    /// Share of the target's probability that is spread evenly over the whole vocabulary, the
    /// target included.
    pub smoothing: f64,
    /// Labels with this value take no part.
    pub ignore_index: i64,
}

impl CrossEntropyOptions {
    /// All columns here, no smoothing, -100 ignored.
    pub fn new(vocab: usize) -> Self {
        Self {
            vocab,
            part: 0,
            smoothing: 0.0,
            ignore_index: -100,
        }
    }

    /// Those of a part's columns that are tokens.
    pub(super) fn tokens_of(&self, part: usize, columns: usize) -> usize {
        self.vocab.saturating_sub(part * columns).min(columns)
    }

    /// The token of the first column.
    pub(super) fn first(&self, columns: usize) -> usize {
        self.part * columns
    }

    /// What a label asks of its own token beyond what it asks of each.
    pub(super) fn on_target(&self) -> f64 {
        1.0 - self.smoothing
    }

    /// What a label asks of every token.
    pub(super) fn on_each(&self) -> f64 {
        self.smoothing / self.vocab as f64
    }

    /// Panics unless these are options for logits of `[s, b, columns]` and such labels.
    pub(super) fn check(&self, name: &str, [s, b, columns]: [usize; 3], labels: [usize; 2]) {
        let Self {
            vocab,
            part,
            smoothing,
            ignore_index,
        } = *self;
        assert_eq!(
            labels,
            [s, b],
            "{name}: labels are not [s, b] of logits [{s}, {b}, {columns}]"
        );
        assert!(
            s * b > 0,
            "{name}: logits are [{s}, {b}, {columns}], without a token"
        );
        // Kernels count tokens in 32 bits.
        let most = i32::MAX as usize;
        assert!(
            (1..=most).contains(&vocab),
            "{name}: a vocabulary of {vocab} tokens"
        );
        assert!(
            columns > 0 && part.saturating_mul(columns) <= most,
            "{name}: part {part} of {columns} columns"
        );
        let ignored = i32::try_from(ignore_index);
        assert!(
            ignored.is_ok(),
            "{name}: ignore_index {ignore_index} is beyond 32 bits"
        );
        // Rounding may leave a target as good as nothing.
        let target = self.on_target() + self.on_each();
        assert!(
            smoothing >= 0.0 && target >= -1e-9,
            "{name}: smoothing {smoothing} is negative or leaves the target {target} of its probability"
        );
    }
}
