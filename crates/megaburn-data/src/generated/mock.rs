//! The documents of Megatron-LM's `--mock-data`.
//!
//! Source: `MockGPTLowLevelDataset` of `gpt_dataset.py`.

use std::ops::Range;

use megaburn_mesh::PositionRng;

/// Number of documents, after which their lengths repeat.
const NUM_DOCUMENTS: usize = 100_000;
/// The length of every document is below this.
const MAX_LEN: u32 = 4096;

/// Documents one after the other, each with an eos at its end.
#[derive(Debug)]
pub(crate) struct MockTokens {
    /// The position after each document.
    ends: Vec<u64>,
    content: MockContent,
    vocab_size: u32,
    eos: u32,
}

/// The tokens of documents before the eos.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum MockContent {
    /// 1, 2, 3, .., modulo the size of the vocabulary.
    Ascending,
    /// Uniform over the vocabulary without eos.
    Random(PositionRng),
}

impl MockTokens {
    pub(super) fn new(content: MockContent, vocab_size: usize, eos: u32) -> Self {
        Self {
            ends: document_ends(),
            content,
            vocab_size: vocab_size as u32,
            eos,
        }
    }

    /// Number of tokens of all documents, after which their lengths repeat.
    pub(super) fn num_tokens(&self) -> u64 {
        self.ends[NUM_DOCUMENTS - 1]
    }

    pub(super) fn get(&self, range: Range<u64>) -> Vec<u32> {
        let period = self.num_tokens();
        let mut tokens = Vec::with_capacity((range.end - range.start) as usize);
        let first = range.start % period;
        let mut document = self.ends.partition_point(|end| *end <= first);
        // The position of the token in all repetitions, and in this one.
        let (mut position, mut at) = (range.start, first);
        while position < range.end {
            let begin = document
                .checked_sub(1)
                .map_or(0, |before| self.ends[before]);
            let end = self.ends[document];
            let num = (end - at).min(range.end - position);
            let token = |place: u64| match self.content {
                _ if at + place + 1 == end => self.eos,
                MockContent::Ascending => ((at + place - begin + 1) % self.vocab_size()) as u32,
                MockContent::Random(rng) => {
                    let drawn = rng.below(position + place, self.vocab_size() - 1) as u32;
                    drawn + u32::from(drawn >= self.eos)
                }
            };
            tokens.extend((0..num).map(token));
            (position, at) = (position + num, at + num);
            document += 1;
            if document == NUM_DOCUMENTS {
                (document, at) = (0, 0);
            }
        }
        tokens
    }

    /// The positions after position `start` at which documents end, in order.
    pub(super) fn document_ends_after(&self, start: u64) -> impl Iterator<Item = u64> + '_ {
        let period = self.num_tokens();
        let (repetition, first) = (start / period, start % period);
        let document = self.ends.partition_point(|end| *end <= first);
        (repetition..).flat_map(move |number| {
            let from = if number == repetition { document } else { 0 };
            self.ends[from..]
                .iter()
                .map(move |end| number * period + end)
        })
    }

    fn vocab_size(&self) -> u64 {
        self.vocab_size.into()
    }
}

/// Where documents end whose lengths are
/// `numpy.random.default_rng(0).integers(1, 4096, size=100000, dtype=numpy.int32)`.
fn document_ends() -> Vec<u64> {
    let mut rng = Pcg64::default();
    let mut end = 0;
    let lengths = (0..NUM_DOCUMENTS).map(|_| 1 + rng.below(MAX_LEN - 1));
    lengths
        .map(|length| {
            end += u64::from(length);
            end
        })
        .collect()
}

/// NumPy's `PCG64` with the seed 0.
///
/// Source: O'Neill 2014, "PCG: A Family of Simple Fast Space-Efficient Statistically Good
/// Algorithms for Random Number Generation" (PCG XSL RR 128/64); `numpy/random/src/pcg64`.
struct Pcg64 {
    state: u128,
    /// The upper half of the last number, if only its lower half was used.
    half: Option<u32>,
}

impl Default for Pcg64 {
    fn default() -> Self {
        Self {
            // `numpy.random.PCG64(0).state["state"]["state"]`
            state: 35_399_562_948_360_463_058_890_781_895_381_311_971,
            half: None,
        }
    }
}

impl Pcg64 {
    const MULTIPLIER: u128 = 0x2360_ED05_1FC6_5DA4_4385_DF64_9FCC_F645;
    /// `numpy.random.PCG64(0).state["state"]["inc"]`
    const INCREMENT: u128 = 87_136_372_517_582_989_555_478_159_403_783_844_777;

    fn next_u32(&mut self) -> u32 {
        if let Some(half) = self.half.take() {
            return half;
        }
        self.state = self
            .state
            .wrapping_mul(Self::MULTIPLIER)
            .wrapping_add(Self::INCREMENT);
        let folded = (self.state >> 64) as u64 ^ self.state as u64;
        let number = folded.rotate_right((self.state >> 122) as u32);
        self.half = Some((number >> 32) as u32);
        number as u32
    }

    /// A uniform number below `bound` (Lemire 2019, "Fast Random Integer Generation in an
    /// Interval").
    fn below(&mut self, bound: u32) -> u32 {
        let threshold = bound.wrapping_neg() % bound;
        loop {
            let product = u64::from(self.next_u32()) * u64::from(bound);
            if product as u32 >= threshold {
                return (product >> 32) as u32;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use flate2::Crc;
    use megaburn_mesh::Purpose;
    use rstest::rstest;
    use serde_json::Value;

    use super::*;

    fn crc(numbers: impl IntoIterator<Item = u32>) -> u32 {
        let mut crc = Crc::new();
        numbers
            .into_iter()
            .for_each(|number| crc.update(&number.to_le_bytes()));
        crc.sum()
    }

    #[test]
    fn documents_are_those_of_megatron() {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../tests/fixtures/megatron-mock.json"
        );
        let fixture: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let number = |value: &Value| value.as_u64().unwrap() as u32;
        let ends = document_ends();
        let lengths = ends
            .iter()
            .zip([0].iter().chain(&ends))
            .map(|(end, begin)| end - begin);
        assert_eq!(
            crc(lengths.map(|length| length as u32)),
            number(&fixture["lengths"])
        );
        for case in fixture["cases"].as_array().unwrap() {
            let [vocab_size, eos] = ["vocab_size", "eod"].map(|key| number(&case[key]));
            let mock = MockTokens::new(MockContent::Ascending, vocab_size as usize, eos);
            for document in case["documents"].as_array().unwrap() {
                let index = document[0].as_u64().unwrap() as usize;
                let begin = index.checked_sub(1).map_or(0, |before| ends[before]);
                let tokens = mock.get(begin..ends[index]);
                assert_eq!(crc(tokens), number(&document[1]), "{document}");
            }
        }
    }

    fn mocks() -> [MockTokens; 2] {
        let rng = PositionRng::new(3, Purpose::DataOrder, "mock");
        [MockContent::Ascending, MockContent::Random(rng)]
            .map(|content| MockTokens::new(content, 50, 7))
    }

    #[rstest]
    fn tokens_depend_on_their_position_only(#[values(1, 500, 3001)] size: u64) {
        for mock in mocks() {
            let period = mock.num_tokens();
            for start in [0, 2995, period - 4000, 5 * period - 3, 1 << 61] {
                let whole = mock.get(start..start + 9000);
                assert!(whole.iter().all(|token| *token < 50));
                let parts = (0..9000u64.div_ceil(size)).flat_map(|part| {
                    let begin = start + part * size;
                    mock.get(begin..(begin + size).min(start + 9000))
                });
                assert_eq!(parts.collect::<Vec<_>>(), whole);
            }
            assert!(mock.get(5..5).is_empty());
        }
    }

    #[test]
    fn random_tokens_are_uniform_and_repeat_never() {
        let [_, mock] = mocks();
        let tokens = mock.get(0..100_000);
        let mut counts = [0u32; 50];
        tokens.iter().for_each(|token| counts[*token as usize] += 1);
        let num_ends = document_ends().partition_point(|end| *end <= 100_000);
        assert_eq!(counts[7] as usize, num_ends);
        let others = counts.iter().enumerate().filter(|(token, _)| *token != 7);
        assert!(
            others
                .map(|(_, count)| *count)
                .all(|count| count.abs_diff(2040) < 300)
        );
        let period = mock.num_tokens();
        assert_ne!(tokens, mock.get(period..period + 100_000));
    }
}
