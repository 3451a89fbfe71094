//! Generated symbols whose entropy is known in closed form. A model that learns reaches this loss
//! floor; a model below the floor has seen its own targets.

use std::ops::Range;

use megaburn_mesh::{PositionRng, Purpose};
use serde::{Deserialize, Serialize};

use crate::error::DataError;

/// Number of symbols of a generated corpus: token ids 0 to 63.
pub const NUM_SYMBOLS: usize = 64;

/// Probabilities of the four successors of a symbol.
const SUCCESSORS: [f64; 4] = [0.5, 0.25, 0.15, 0.1];

/// Probability that `echo` repeats an earlier symbol instead of drawing a new one.
const REPEAT: f64 = 0.9;

/// The rule that generates the symbols. In TOML: `"markov"` or `{ echo = { distance = 7 } }`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SyntheticKind {
    /// Each symbol has four successors, with probabilities 0.5, 0.25, 0.15 and 0.1; the seed
    /// selects which four. Learning it needs only an embedding and an MLP.
    Markov,
    /// The symbol `distance` places back is repeated with probability 0.9; otherwise one of the 64
    /// symbols is drawn uniformly. Learning it needs attention and positions.
    Echo {
        /// The distance to the repeated symbol, in places; at least 1.
        distance: usize,
    },
}

/// An endless text of symbols; equal kinds and seeds give equal texts.
///
/// ```
/// use megaburn_data::{Synthetic, SyntheticKind};
///
/// let echo = Synthetic::new(SyntheticKind::Echo { distance: 7 }, 1)?;
/// assert!((echo.entropy() - 0.7295).abs() < 1e-4);
/// assert_eq!(echo.tokens(10), echo.tokens(20)[..10]);
/// # Ok::<(), megaburn_data::DataError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Synthetic {
    kind: SyntheticKind,
    seed: u64,
}

impl Synthetic {
    /// The text of `kind` for `seed`.
    ///
    /// # Errors
    /// The echo distance is 0.
    pub fn new(kind: SyntheticKind, seed: u64) -> Result<Self, DataError> {
        match kind {
            SyntheticKind::Echo { distance: 0 } => Err(DataError::Zero {
                what: "the distance of a synthetic echo",
            }),
            _ => Ok(Self { kind, seed }),
        }
    }

    /// The rule that generates the symbols.
    pub fn kind(&self) -> SyntheticKind {
        self.kind
    }

    /// The seed of the text.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The first `num_tokens` symbols.
    pub fn tokens(&self, num_tokens: usize) -> Vec<u32> {
        self.tokens_at(0..num_tokens as u64)
    }

    /// The symbols at the positions `range`, without those before them.
    pub fn tokens_at(&self, range: Range<u64>) -> Vec<u32> {
        match self.kind {
            SyntheticKind::Markov => self.markov(range),
            SyntheticKind::Echo { distance } => self.echo(range, distance as u64),
        }
    }

    /// Entropy, in nats, of a symbol given all symbols before it: 1.2080 (`Markov`), 0.7295
    /// (`Echo`).
    pub fn entropy(&self) -> f64 {
        match self.kind {
            SyntheticKind::Markov => SUCCESSORS.iter().map(|&p| surprise(p)).sum(),
            SyntheticKind::Echo { .. } => {
                let other = (1.0 - REPEAT) / NUM_SYMBOLS as f64;
                surprise(REPEAT + other) + (NUM_SYMBOLS - 1) as f64 * surprise(other)
            }
        }
    }

    /// The lowest mean loss, in nats per token, that a model can reach on samples with inputs
    /// `x[0..seq_len]` and targets `x[1..=seq_len]`.
    ///
    /// In an echo, the targets `x[1..distance]` repeat symbols that precede the sample, so each of
    /// them costs `ln 64`.
    pub fn floor(&self, seq_len: usize) -> f64 {
        let blind = match self.kind {
            SyntheticKind::Markov => 0,
            SyntheticKind::Echo { distance } => (distance - 1).min(seq_len),
        } as f64;
        let seq_len = seq_len as f64;
        (blind * (NUM_SYMBOLS as f64).ln() + (seq_len - blind) * self.entropy()) / seq_len
    }

    fn markov(&self, range: Range<u64>) -> Vec<u32> {
        let rng = PositionRng::new(self.seed, Purpose::Sampling, "synthetic.markov");
        let rows = successors(rng.with_stream(0));
        let walk = rng.with_stream(1);
        let step = |state: usize, at: u64| {
            let mut rest = f64::from(walk.uniform(at));
            let choice = SUCCESSORS.iter().position(|&p| {
                rest -= p;
                rest < 0.0
            });
            rows[state][choice.unwrap_or(SUCCESSORS.len() - 1)]
        };
        let first = rng.with_stream(2).below(0, NUM_SYMBOLS as u64) as usize;
        let mut state = state_before(range.start, first, step);
        range
            .map(|at| {
                state = step(state, at);
                state as u32
            })
            .collect()
    }

    fn echo(&self, range: Range<u64>, distance: u64) -> Vec<u32> {
        let rng = PositionRng::new(self.seed, Purpose::Sampling, "synthetic.echo");
        let repeat = rng.with_stream(0);
        let draw = rng.with_stream(1);
        let repeats = |at| at >= distance && f64::from(repeat.uniform(at)) < REPEAT;
        let start = range.start;
        let mut tokens: Vec<u32> = Vec::with_capacity((range.end - start) as usize);
        for mut at in range {
            let token = loop {
                if !repeats(at) {
                    break draw.below(at, NUM_SYMBOLS as u64) as u32;
                }
                at -= distance;
                if at >= start {
                    break tokens[(at - start) as usize];
                }
            };
            tokens.push(token);
        }
        tokens
    }
}

/// The state of the walk before position `at`.
///
/// The random choice at a position moves every state, so two walks that meet stay together. From
/// some hundreds of positions before, the walks of all states have met, and where they are does not
/// depend on the states before (coupling from the past; Propp and Wilson 1996).
fn state_before(at: u64, first: usize, step: impl Fn(usize, u64) -> usize) -> usize {
    let mut num_steps = 512;
    while num_steps < at {
        let mut states = u64::MAX;
        for position in at - num_steps..at {
            let mut next = 0;
            while states != 0 {
                next |= 1 << step(states.trailing_zeros() as usize, position);
                states &= states - 1;
            }
            states = next;
        }
        if states.is_power_of_two() {
            return states.trailing_zeros() as usize;
        }
        num_steps = num_steps.saturating_mul(4);
    }
    (0..at).fold(first, step)
}

/// Four distinct successors of every symbol: the first four elements of a shuffle of all symbols.
fn successors(rng: PositionRng) -> Vec<[usize; 4]> {
    (0..NUM_SYMBOLS)
        .map(|row| {
            let mut symbols: [usize; NUM_SYMBOLS] = std::array::from_fn(|i| i);
            std::array::from_fn(|i| {
                let index = (row * NUM_SYMBOLS + i) as u64;
                symbols.swap(i, i + rng.below(index, (NUM_SYMBOLS - i) as u64) as usize);
                symbols[i]
            })
        })
        .collect()
}

fn surprise(p: f64) -> f64 {
    -p * p.ln()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const N: usize = 1 << 18;

    fn synthetic(kind: SyntheticKind, seed: u64) -> Synthetic {
        Synthetic::new(kind, seed).unwrap()
    }

    /// Entropy of a token given the token `distance` places before it, estimated from counts.
    /// Counting 64 x 64 pairs underestimates it by about 63 * 64 / 2N = 0.008 nats if all pairs
    /// occur.
    fn conditional_entropy(tokens: &[u32], distance: usize) -> f64 {
        let mut counts = vec![[0u32; NUM_SYMBOLS]; NUM_SYMBOLS];
        for (&past, &now) in tokens.iter().zip(&tokens[distance..]) {
            counts[past as usize][now as usize] += 1;
        }
        let total = (tokens.len() - distance) as f64;
        let row = |row: &[u32; NUM_SYMBOLS]| {
            let sum: u32 = row.iter().sum();
            row.iter()
                .filter(|&&c| c > 0)
                .map(|&c| f64::from(c) / total * (f64::from(sum) / f64::from(c)).ln())
                .sum::<f64>()
        };
        counts.iter().map(row).sum()
    }

    #[test]
    fn the_closed_forms_are_the_documented_figures() {
        let markov = synthetic(SyntheticKind::Markov, 0);
        assert!(
            (markov.entropy() - 1.2080).abs() < 5e-5,
            "{}",
            markov.entropy()
        );
        assert_eq!(markov.floor(100), markov.entropy());
        let echo = synthetic(SyntheticKind::Echo { distance: 7 }, 0);
        assert!((echo.entropy() - 0.7295).abs() < 5e-5, "{}", echo.entropy());
        let floor = (122.0 * echo.entropy() + 6.0 * 64f64.ln()) / 128.0;
        assert!((echo.floor(128) - floor).abs() < 1e-12);
        assert!(
            (echo.floor(3) - 64f64.ln()).abs() < 1e-12,
            "no target has its source in view"
        );
        let next = synthetic(SyntheticKind::Echo { distance: 1 }, 0);
        assert!((next.floor(128) - next.entropy()).abs() < 1e-12);
    }

    #[rstest]
    fn the_next_symbol_of_markov_is_as_uncertain_as_its_closed_form(#[values(1, 2, 77)] seed: u64) {
        let markov = synthetic(SyntheticKind::Markov, seed);
        let tokens = markov.tokens(N);
        let h = conditional_entropy(&tokens, 1);
        assert!((h - markov.entropy()).abs() < 0.01, "{h}");
        assert!(
            conditional_entropy(&tokens, 5) > 2.0,
            "only the last symbol tells the next"
        );
    }

    #[rstest]
    fn an_echo_is_certain_from_its_source_and_noise_from_elsewhere(
        #[values(1, 7, 12)] distance: usize,
        #[values(3, 4)] seed: u64,
    ) {
        let echo = synthetic(SyntheticKind::Echo { distance }, seed);
        let tokens = echo.tokens(N);
        let h = conditional_entropy(&tokens, distance);
        assert!((h - echo.entropy()).abs() < 0.02, "{h}");
        if distance > 1 {
            // A pair recurs `distance` later with probability 0.81, so the effective number of
            // pairs is about a tenth of their count, and counting underestimates the entropy by
            // 0.08.
            let h = conditional_entropy(&tokens, distance - 1);
            assert!((h - 64f64.ln()).abs() < 0.1, "{h}");
        }
    }

    /// The mean loss of a predictor that knows the rule and sees a sample only, and the standard
    /// error of this mean.
    fn optimal_loss(kind: SyntheticKind, seed: u64, seq_len: usize) -> (f64, f64) {
        let law = synthetic(kind, seed);
        let rng = PositionRng::new(seed, Purpose::Sampling, "synthetic.markov");
        let rows = successors(rng.with_stream(0));
        let probability = |sample: &[u32], at: usize| match kind {
            SyntheticKind::Markov => {
                let row = &rows[sample[at - 1] as usize];
                let choice = row.iter().position(|s| *s == sample[at] as usize);
                SUCCESSORS[choice.unwrap()]
            }
            SyntheticKind::Echo { distance } if at < distance => 1.0 / 64.0,
            SyntheticKind::Echo { distance } => {
                let is_repeat = sample[at] == sample[at - distance];
                0.1 / 64.0 + if is_repeat { 0.9 } else { 0.0 }
            }
        };
        let num_samples = N / seq_len;
        let losses: Vec<f64> = (0..num_samples as u64)
            .map(|number| {
                let start = (1 << 50) + number * seq_len as u64;
                let sample = law.tokens_at(start..start + seq_len as u64 + 1);
                let losses = (1..=seq_len).map(|at| -probability(&sample, at).ln());
                losses.sum::<f64>() / seq_len as f64
            })
            .collect();
        let mean = losses.iter().sum::<f64>() / num_samples as f64;
        let squares = losses.iter().map(|loss| (loss - mean).powi(2)).sum::<f64>();
        (mean, squares.sqrt() / num_samples as f64)
    }

    #[rstest]
    fn a_predictor_that_knows_the_rule_reaches_the_floor(
        #[values(
            SyntheticKind::Markov,
            SyntheticKind::Echo { distance: 1 },
            SyntheticKind::Echo { distance: 7 },
            SyntheticKind::Echo { distance: 40 },
        )]
        kind: SyntheticKind,
        #[values(16, 61)] seq_len: usize,
    ) {
        let seed = fastrand::u64(..);
        let (mean, error) = optimal_loss(kind, seed, seq_len);
        let floor = synthetic(kind, seed).floor(seq_len);
        assert!(error < 0.01);
        assert!(
            (mean - floor).abs() < 6.0 * error + 1e-9,
            "seed {seed}: {mean} +- {error}, but the floor is {floor}"
        );
    }

    #[rstest]
    fn symbols_are_a_function_of_their_position(
        #[values(
            SyntheticKind::Markov,
            SyntheticKind::Echo { distance: 1 },
            SyntheticKind::Echo { distance: 300 },
        )]
        kind: SyntheticKind,
    ) {
        for seed in std::iter::repeat_with(|| fastrand::u64(..)).take(40) {
            let law = synthetic(kind, seed);
            let begin = law.tokens(6000);
            for start in [1, 511, 513, 3000, 5999] {
                let part = law.tokens_at(start..6000);
                assert_eq!(part, begin[start as usize..], "seed {seed}");
            }
            let far = law.tokens_at((1 << 60) - 3000..(1 << 60) + 10);
            assert_eq!(
                law.tokens_at(1 << 60..(1 << 60) + 10),
                far[3000..],
                "seed {seed}"
            );
        }
    }

    #[rstest]
    fn symbols_depend_on_the_seed_and_fill_their_range(
        #[values(SyntheticKind::Markov, SyntheticKind::Echo { distance: 5 })] kind: SyntheticKind,
    ) {
        let tokens = synthetic(kind, 9).tokens(10_000);
        assert_eq!(tokens, synthetic(kind, 9).tokens(10_000));
        assert_ne!(tokens, synthetic(kind, 10).tokens(10_000));
        assert!(tokens.iter().all(|&t| (t as usize) < NUM_SYMBOLS));
        let kinds: std::collections::BTreeSet<_> = tokens.iter().collect();
        assert!(kinds.len() > 48, "{} symbols occur", kinds.len());
    }

    #[test]
    fn every_symbol_of_markov_has_four_different_successors() {
        let rows = successors(PositionRng::new(5, Purpose::Sampling, "rows"));
        for row in &rows {
            let distinct: std::collections::BTreeSet<_> = row.iter().collect();
            assert!(
                distinct.len() == 4 && row.iter().all(|&s| s < NUM_SYMBOLS),
                "{row:?}"
            );
        }
        assert_ne!(rows[0], rows[1]);
    }

    #[test]
    fn a_distance_of_zero_is_refused() {
        let error = Synthetic::new(SyntheticKind::Echo { distance: 0 }, 1).unwrap_err();
        let expected = "the distance of a synthetic echo is 0 but must be at least 1";
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn kinds_are_written_in_a_configuration_by_name() {
        for (kind, text) in [
            (SyntheticKind::Markov, r#""markov""#),
            (
                SyntheticKind::Echo { distance: 5 },
                r#"{"echo":{"distance":5}}"#,
            ),
        ] {
            assert_eq!(serde_json::to_string(&kind).unwrap(), text);
            assert_eq!(serde_json::from_str::<SyntheticKind>(text).unwrap(), kind);
        }
    }
}
