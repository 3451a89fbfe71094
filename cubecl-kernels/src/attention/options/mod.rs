//! What is attended to, and how it is computed.

mod kernel;
mod packed;
mod tiles;

use std::ops::Range;

use crate::dropout::DropoutKey;
pub use kernel::{AUTO_LEN, AttentionKernel};
#[cfg(feature = "cuda")]
pub(super) use packed::Bounds;
pub use packed::PackedSequences;
pub(super) use packed::Sequence;
pub use tiles::AttentionTiles;

/// Which keys a query sees, and how scores are scaled. Default: all keys, `1 / sqrt(d)`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AttentionOptions {
    /// Scale of the scores; `None` is `1 / sqrt(d)`.
    pub scale: Option<f64>,
    /// Causal mask: query `i` has position `query_offset + i` and sees no later key
    /// (`j > position`).
    pub causal: bool,
    /// Position of the first query, counted in keys.
    pub query_offset: usize,
    /// A query sees only keys with `position - j < window` (Mistral's sliding window). It limits
    /// the past, with or without `causal`.
    pub window: Option<usize>,
    /// Scores are `cap * tanh(score / cap)` before they are masked (Gemma 2, arXiv:2408.00118).
    pub soft_cap: Option<f64>,
    /// Packed sequences in the rows of the batch, which do not see each other.
    pub sequences: Option<PackedSequences>,
    /// Dropout of probabilities. It comes after the softmax, whose sums include the dropped ones.
    pub dropout: Option<AttentionDropout>,
    /// The implementation.
    pub kernel: AttentionKernel,
    /// Tile shapes of the CubeCL kernel, for measurements.
    pub tiles: AttentionTiles,
}

/// Dropout of attention probabilities. What is dropped depends on the seed, path and stream, and on
/// the global position of query, key and head, so that ranks that hold different parts agree.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionDropout {
    /// The fraction of probabilities that is dropped; the others are divided by `1 - p`.
    pub p: f64,
    /// The key for the global tensor of probabilities, `[b, hq, s_q, s_k]`.
    pub key: DropoutKey,
}

impl AttentionDropout {
    /// Drops the fraction `p` of the probabilities.
    ///
    /// # Panics
    /// If `p` is not in `[0, 1)`.
    pub fn new(p: f64, key: DropoutKey) -> Self {
        check_probability(p);
        Self { p, key }
    }
}

fn check_probability(p: f64) {
    assert!(
        (0.0..1.0).contains(&p),
        "attention: dropout probability {p} is not in [0, 1)"
    );
}

/// A part of the problem that is attended separately: one sequence, or everything.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Piece {
    /// Rows of the batch.
    pub(super) rows: Range<usize>,
    pub(super) queries: Range<usize>,
    pub(super) keys: Range<usize>,
    /// The options of this piece, without sequences.
    pub(super) options: AttentionOptions,
}

impl AttentionOptions {
    /// Causal self-attention over a full sequence.
    pub fn causal() -> Self {
        Self {
            causal: true,
            ..Self::default()
        }
    }

    /// The number of query-key pairs whose probabilities a head saves for backward in composed
    /// attention, for self-attention over `s` positions.
    pub fn fallback_pairs(&self, s: usize) -> usize {
        let pairs = |block: Range<usize>| block.len() * self.visible_to_any(block, s).len();
        self.blocks(s).map(pairs).sum()
    }

    /// Panics unless the options fit `b` rows of `s_q` queries and `s_k` keys, with `hq` heads.
    pub(super) fn check(&self, [b, hq, s_q, s_k]: [usize; 4]) {
        if let Some(sequences) = &self.sequences {
            sequences.check(b, s_q, s_k);
        }
        if let Some(AttentionDropout { p, key }) = &self.dropout {
            check_probability(*p);
            key.check(&[b, hq, s_q, s_k]);
        }
        if let Some(cap) = self.soft_cap {
            assert!(
                cap > 0.0 && cap.is_finite(),
                "attention: soft cap {cap} must be greater than 0"
            );
        }
        if let Some(scale) = self.scale {
            assert!(
                scale.is_finite(),
                "attention: scale {scale} is not a finite number"
            );
        }
        // Kernels count positions in 32 bits.
        let offset = self.query_offset;
        let most = (i32::MAX as usize).saturating_sub(s_q.max(s_k));
        assert!(
            offset <= most,
            "attention: query offset {offset} exceeds {most}"
        );
    }

    /// One piece per sequence; a single piece without packed sequences.
    pub(super) fn pieces(&self, b: usize, s_q: usize, s_k: usize) -> Vec<Piece> {
        let Some(sequences) = &self.sequences else {
            return vec![Piece {
                rows: 0..b,
                queries: 0..s_q,
                keys: 0..s_k,
                options: self.clone(),
            }];
        };
        let alone = Self {
            sequences: None,
            dropout: None,
            ..*self
        };
        let piece = |Sequence {
                         row,
                         queries,
                         keys,
                         offset,
                     }| {
            let dropout = self.dropout.clone().map(|AttentionDropout { p, key }| {
                let key = key
                    .moved(0, row)
                    .moved(2, queries.start)
                    .moved(3, keys.start);
                AttentionDropout { p, key }
            });
            let query_offset = alone.query_offset + offset;
            let options = Self {
                dropout,
                query_offset,
                ..alone.clone()
            };
            Piece {
                rows: row..row + 1,
                queries,
                keys,
                options,
            }
        };
        sequences.sequences().map(piece).collect()
    }

    /// The scale of the scores for heads of size `d`.
    pub(crate) fn factor(&self, d: usize) -> f64 {
        self.scale.unwrap_or_else(|| 1.0 / (d as f64).sqrt())
    }

    /// The range of the `s_k` keys that query `i` sees.
    pub(crate) fn visible(&self, i: usize, s_k: usize) -> Range<usize> {
        let position = self.query_offset + i;
        let start = self
            .window
            .map_or(0, |window| (position + 1).saturating_sub(window))
            .min(s_k);
        let end = if self.causal {
            (position + 1).min(s_k)
        } else {
            s_k
        };
        start..end.max(start)
    }

    /// The smallest range of keys that covers all keys that `queries` see. It is never empty, so
    /// that there is something to mask.
    pub(crate) fn visible_to_any(&self, queries: Range<usize>, s_k: usize) -> Range<usize> {
        // Both ends are non-decreasing in `i`.
        let seeing = queries
            .map(|i| self.visible(i, s_k))
            .filter(|keys| !keys.is_empty());
        seeing
            .reduce(|all, keys| all.start..keys.end)
            .unwrap_or(0..1)
    }

    /// The blocks of queries that are attended together: all queries at once or, with a mask that
    /// depends on the query, blocks small enough to skip keys that none of their queries sees, and
    /// large enough to be worth a call.
    pub(crate) fn blocks(&self, s_q: usize) -> impl Iterator<Item = Range<usize>> {
        let whole = !self.causal && self.window.is_none();
        let len = if whole {
            s_q
        } else {
            s_q.div_ceil(MAX_BLOCKS).max(MIN_BLOCK)
        }
        .max(1);
        (0..s_q)
            .step_by(len)
            .map(move |start| start..(start + len).min(s_q))
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
            assert!(
                AttentionOptions::default()
                    .blocks(s_q)
                    .eq(std::iter::once(0..s_q))
            );
        }
    }

    #[test]
    fn composed_attention_holds_the_pairs_of_its_blocks() {
        assert_eq!(AttentionOptions::default().fallback_pairs(100), 100 * 100);
        // 32 queries see 32 keys, 32 see 64, 32 see 96, and 4 see all 100.
        assert_eq!(
            AttentionOptions::causal().fallback_pairs(100),
            32 * (32 + 64 + 96) + 4 * 100
        );
        let window = AttentionOptions {
            window: Some(8),
            ..AttentionOptions::causal()
        };
        assert_eq!(window.fallback_pairs(64), 32 * 32 + 32 * 39);
    }

    #[test]
    fn a_block_sees_what_its_queries_see() {
        let options = AttentionOptions {
            window: Some(4),
            query_offset: 2,
            ..Default::default()
        };
        let causal = AttentionOptions {
            causal: true,
            ..options.clone()
        };
        assert_eq!(causal.visible(3, 20), 2..6);
        assert_eq!(options.visible(3, 20), 2..20);
        assert_eq!(causal.visible_to_any(3..7, 20), 2..9);
        assert_eq!(causal.visible_to_any(3..30, 7), 2..7);
        assert_eq!(causal.visible_to_any(20..30, 7), 0..1);
    }
}
