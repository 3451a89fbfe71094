//! What is masked in a sample.
//!
//! Source: `MaskedWordPieceDataset._create_masked_lm_predictions` of `masked_dataset.py`.

use super::{masking_config::MaskingConfig, ngrams::NgramLengths, pieces::Pieces};
use crate::megatron::random::RandomState;

/// Masks n-grams of words or pieces.
#[derive(Clone, Debug)]
pub(super) struct Masking {
    probability: f64,
    whole_words: bool,
    lengths: NgramLengths,
    /// Tokens that are never masked, because they stand between segments.
    separators: [Option<u32>; 2],
}

/// What can be masked in a sample: positions in ascending order, of which each candidate has one or
/// several.
struct Candidates {
    positions: Vec<usize>,
    /// The first of the positions of each candidate, and their number at the end.
    starts: Vec<usize>,
}

impl Candidates {
    fn len(&self) -> usize {
        self.starts.len() - 1
    }

    /// The positions of up to `n` candidates from one on.
    fn ngram(&self, candidate: usize, n: usize) -> &[usize] {
        let end = candidate.saturating_add(n).min(self.len());
        &self.positions[self.starts[candidate]..self.starts[end]]
    }
}

impl Masking {
    /// `config` has been checked.
    pub(super) fn new(config: &MaskingConfig, separators: [Option<u32>; 2]) -> Self {
        Self {
            probability: config.probability,
            whole_words: config.whole_words,
            lengths: NgramLengths::new(config),
            separators,
        }
    }

    /// The n-grams that are masked: the positions of each in ascending order, and the n-grams in
    /// the order of their first position. `on_masked` is called with each position when it is
    /// masked, because it may draw.
    pub(super) fn spans(
        &self,
        tokens: &[u32],
        target_len: usize,
        pieces: &Pieces,
        random: &mut RandomState,
        mut on_masked: impl FnMut(usize, &mut RandomState),
    ) -> Vec<Vec<usize>> {
        let candidates = self.candidates(tokens, pieces);
        let rounded = (tokens.len() as f64 * self.probability).round_ties_even();
        let most = (target_len as f64 * self.probability).min(rounded.max(1.0));
        let mut order: Vec<usize> = (0..candidates.len()).collect();
        random.shuffle(&mut order);

        let mut is_masked = vec![false; tokens.len()];
        let mut num_masked = 0;
        let mut spans = Vec::new();
        for candidate in order {
            if num_masked as f64 >= most {
                break;
            }
            let longest = self.lengths.draw(random);
            // The longest n-gram that stays within the bound.
            let ngram = (1..=longest)
                .rev()
                .map(|n| candidates.ngram(candidate, n))
                .find(|ngram| (num_masked + ngram.len()) as f64 <= most);
            let Some(ngram) = ngram else { continue };
            if ngram.iter().any(|position| is_masked[*position]) {
                continue;
            }
            for position in ngram {
                is_masked[*position] = true;
                on_masked(*position, random);
            }
            num_masked += ngram.len();
            spans.push(ngram.to_vec());
        }
        spans.sort_unstable_by_key(|span| span[0]);
        spans
    }

    fn candidates(&self, tokens: &[u32], pieces: &Pieces) -> Candidates {
        let mut positions = Vec::with_capacity(tokens.len());
        let mut starts = Vec::with_capacity(tokens.len() + 1);
        for (position, token) in tokens.iter().enumerate() {
            if self.separators.contains(&Some(*token)) {
                continue;
            }
            let continues = pieces.continues(*token) == Some(true);
            if !(continues && self.whole_words && !starts.is_empty()) {
                starts.push(positions.len());
            }
            positions.push(position);
        }
        starts.push(positions.len());
        Candidates { positions, starts }
    }
}
