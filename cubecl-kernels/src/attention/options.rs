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

    /// The smallest stretch of keys that holds all that `queries` see (never empty, so that there
    /// is something to mask).
    pub(crate) fn visible_to_any(&self, queries: Range<usize>, s_k: usize) -> Range<usize> {
        // Both ends only move forward from query to query.
        let seeing = queries.map(|i| self.visible(i, s_k)).filter(|keys| !keys.is_empty());
        seeing.reduce(|all, keys| all.start..keys.end).unwrap_or(0..1)
    }

    /// Stretches of queries to be attended together: all of them, or, where each sees other keys,
    /// pieces small enough to leave out what none of them sees and large enough to be worth a call.
    pub(crate) fn blocks(&self, s_q: usize) -> impl Iterator<Item = Range<usize>> {
        let whole = !self.causal && self.window.is_none();
        let len = if whole { s_q } else { s_q.div_ceil(MAX_BLOCKS).max(MIN_BLOCK) }.max(1);
        (0..s_q).step_by(len).map(move |start| start..(start + len).min(s_q))
    }
}

const MAX_BLOCKS: usize = 8;
const MIN_BLOCK: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_tile_the_queries() {
        for s_q in [1, 31, 32, 33, 128, 1000] {
            let blocks: Vec<_> = AttentionOptions::causal().blocks(s_q).collect();
            assert!(blocks.len() <= MAX_BLOCKS);
            assert!(blocks.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert_eq!((blocks[0].start, blocks[blocks.len() - 1].end), (0, s_q));
            assert!(AttentionOptions::default().blocks(s_q).eq(std::iter::once(0..s_q)));
        }
    }

    #[test]
    fn a_block_sees_what_its_queries_see() {
        let options = AttentionOptions { window: Some(4), query_offset: 2, ..Default::default() };
        let causal = AttentionOptions { causal: true, ..options.clone() };
        assert_eq!(causal.visible(3, 20), 2..6);
        assert_eq!(options.visible(3, 20), 2..20);
        assert_eq!(causal.visible_to_any(3..7, 20), 2..9);
        assert_eq!(causal.visible_to_any(3..30, 7), 2..7);
        assert_eq!(causal.visible_to_any(20..30, 7), 0..1);
    }
}
