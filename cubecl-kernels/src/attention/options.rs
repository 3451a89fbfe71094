use std::ops::Range;

/// Which keys a query sees, and how scores are scaled. The default: all keys, `1 / sqrt(d)`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AttentionOptions {
    /// Factor of the scores; `None` is `1 / sqrt(d)`.
    pub scale: Option<f64>,
    /// Query `i` stands at position `query_offset + i` and sees no key `j` behind it
    /// (`j > position`).
    pub causal: bool,
    /// Position of the first query, counted in keys.
    pub query_offset: usize,
    /// A query sees only keys with `position - j < window` (Mistral's sliding window; it bounds the
    /// past, with or without `causal`).
    pub window: Option<usize>,
}

impl AttentionOptions {
    /// Causal self-attention over a whole sequence.
    pub fn causal() -> Self {
        Self { causal: true, ..Self::default() }
    }

    /// The factor of the scores of heads of size `d`.
    pub(crate) fn factor(&self, d: usize) -> f64 {
        self.scale.unwrap_or_else(|| 1.0 / (d as f64).sqrt())
    }

    /// The keys out of `s_k` that query `i` sees.
    pub(crate) fn visible(&self, i: usize, s_k: usize) -> Range<usize> {
        let position = self.query_offset + i;
        let start = self.window.map_or(0, |window| (position + 1).saturating_sub(window)).min(s_k);
        let end = if self.causal { (position + 1).min(s_k) } else { s_k };
        start..end.max(start)
    }
}
