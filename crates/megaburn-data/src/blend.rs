//! The mixing of several data sets by weight.

use megaburn_mesh::{PositionRng, Purpose};

use crate::{
    error::DataError,
    samples::{Sample, Samples, order_hash_of},
};

/// Bits of a position within a block.
const BITS: u32 = 32;
/// Samples of a block. Each block has the same number of samples of each source.
const BLOCK: u64 = 1 << BITS;

/// Which source the sample at each position is from: a pure function of seed and weights, computed
/// on demand.
///
/// In each block of 2^32 samples, source `s` owns an interval of slots whose length is its weight.
/// The position is mapped to a slot by a scrambled van der Corput sequence (Owen 1995, "Randomly
/// permuted (t,m,s)-nets and (t,s)-sequences"): of any 2^k consecutive positions that start at a
/// multiple of 2^k, one is in each of 2^k equal parts of the slots. So the sources are mixed evenly
/// at every scale, and random within that.
#[derive(Clone, Debug, PartialEq)]
pub struct Blend {
    rng: PositionRng,
    /// Where the slots of each source begin, and the end of the last.
    begins: Vec<u64>,
}

impl Blend {
    /// A blend by weights, which need not sum to 1. They are rounded to multiples of 2^-32.
    ///
    /// # Errors
    /// A weight is not a positive number, or is below one sample in 2^32.
    pub fn new(weights: &[f64], seed: u64) -> Result<Self, DataError> {
        let bad = |weight: f64, why: &str| {
            let why = why.into();
            Err(DataError::Weight { weight, why })
        };
        if let Some(&weight) = weights.iter().find(|w| !(w.is_finite() && **w > 0.0)) {
            return bad(
                weight,
                "it must be a positive number; leave a source without weight out",
            );
        }
        let sum: f64 = weights.iter().sum();
        let shares: Vec<f64> = weights.iter().map(|w| w / sum * BLOCK as f64).collect();
        let mut lens: Vec<u64> = shares.iter().map(|share| *share as u64).collect();
        // The slots that are left go to the largest remainders.
        let remainder = |index: usize| shares[index] - shares[index].floor();
        let mut order: Vec<usize> = (0..lens.len()).collect();
        order.sort_by(|a, b| remainder(*b).total_cmp(&remainder(*a)).then(a.cmp(b)));
        let num_left = BLOCK.saturating_sub(lens.iter().sum()) as usize;
        for index in order.into_iter().cycle().take(num_left) {
            lens[index] += 1;
        }
        if let Some(index) = lens.iter().position(|len| *len == 0) {
            return bad(
                weights[index],
                "it is less than one sample in 2^32 of the blend",
            );
        }
        let mut end = 0;
        let ends = lens.iter().map(|len| {
            end += len;
            end
        });
        Ok(Self {
            rng: PositionRng::new(seed, Purpose::DataOrder, "blend"),
            begins: [0].into_iter().chain(ends).collect(),
        })
    }

    /// The source of the sample at `position`, and how many samples of that source come before it.
    pub fn source_at(&self, position: u64) -> (usize, u64) {
        let (block, place) = (position >> BITS, position & (BLOCK - 1));
        let rng = self.rng.with_stream(block);
        let slot = slot_of(rng, place);
        let source = self.begins.partition_point(|begin| *begin <= slot) - 1;
        let (begin, end) = (self.begins[source], self.begins[source + 1]);
        let before = num_below(rng, place, end) - num_below(rng, place, begin);
        (source, block * (end - begin) + before)
    }

    /// How many of the first `num` samples are of each source.
    pub fn counts(&self, num: u64) -> Vec<u64> {
        let (blocks, places) = (num >> BITS, num & (BLOCK - 1));
        let rng = self.rng.with_stream(blocks);
        let below = self.begins.iter().map(|end| num_below(rng, places, *end));
        let below: Vec<u64> = below.collect();
        let pairs = below.windows(2).zip(self.begins.windows(2));
        pairs
            .map(|(counts, slots)| counts[1] - counts[0] + blocks * (slots[1] - slots[0]))
            .collect()
    }

    /// The largest number of first samples that read no sample of a source twice, for sources of
    /// these sizes.
    fn num_unrepeated(&self, sizes: &[u64]) -> u64 {
        let repeats = |num: u64| {
            let counts = self.counts(num).into_iter();
            counts.zip(sizes).any(|(count, size)| count > *size)
        };
        let (mut low, mut high) = (0, sizes.iter().sum::<u64>() + 1);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if repeats(middle) {
                high = middle;
            } else {
                low = middle;
            }
        }
        low
    }

    /// The share of each source.
    pub fn shares(&self) -> Vec<f64> {
        let lens = self.begins.windows(2).map(|pair| pair[1] - pair[0]);
        lens.map(|len| len as f64 / BLOCK as f64).collect()
    }
}

/// The random bit that scrambles bit `level` of the slot of all places with these lower bits.
fn scramble(rng: PositionRng, level: u32, low: u64) -> u64 {
    rng.below(u64::from(level) << BITS | low, 2)
}

/// The slot of a place: its bits in reverse order, each scrambled by those before it.
fn slot_of(rng: PositionRng, place: u64) -> u64 {
    (0..BITS).fold(0, |slot, level| {
        let low = place & ((1 << level) - 1);
        slot << 1 | (place >> level & 1 ^ scramble(rng, level, low))
    })
}

/// How many of the first `num` places have a slot below `end`.
fn num_below(rng: PositionRng, num: u64, end: u64) -> u64 {
    if end == BLOCK {
        return num;
    }
    let mut begin = 0;
    let mut count = 0;
    // The places are windows of 2^k, of which each has one place in each of 2^k parts of the slots.
    for bits in (0..BITS).rev() {
        if num >> bits & 1 == 0 {
            continue;
        }
        let part = end >> (BITS - bits);
        // The place of this window in the part in which `end` is.
        let mut low = 0;
        for level in 0..bits {
            let wanted = part >> (bits - 1 - level) & 1;
            low |= (wanted ^ scramble(rng, level, low)) << level;
        }
        let is_below = slot_of(rng, begin | low) < end;
        count += part + u64::from(is_below);
        begin += 1 << bits;
    }
    count
}

/// Samples of several data sets, mixed by weight. Each source is read in its own order, as if it
/// were the only one. Sources of different types are mixed as `Arc<dyn Samples>`.
#[derive(Clone, Debug)]
pub struct BlendedSampler<S> {
    sources: Vec<S>,
    blend: Blend,
    num_samples: u64,
    /// The first sample of the blend.
    first: u64,
    /// How many samples of each source were read before it.
    num_before: Vec<u64>,
}

impl<S: Samples> BlendedSampler<S> {
    /// Mixes `sources` by `weights`, which need not sum to 1. Without weights, the sources are mixed
    /// by their numbers of samples.
    ///
    /// # Errors
    /// There is no source; a weight is not a positive number, or is below one sample in 2^32; the
    /// numbers of weights and sources differ.
    pub fn new(sources: Vec<S>, weights: Option<&[f64]>, seed: u64) -> Result<Self, DataError> {
        if sources.is_empty() {
            let what = "the number of data sets";
            return Err(DataError::Zero { what });
        }
        let sizes: Vec<u64> = sources.iter().map(Samples::num_samples).collect();
        let by_size = || sizes.iter().map(|size| *size as f64).collect();
        let weights = weights.map_or_else(by_size, <[f64]>::to_vec);
        if weights.len() != sources.len() {
            return Err(DataError::NumWeights {
                num_weights: weights.len(),
                num_sources: sources.len(),
            });
        }
        let blend = Blend::new(&weights, seed)?;
        Ok(Self {
            num_samples: blend.num_unrepeated(&sizes),
            num_before: vec![0; sources.len()],
            sources,
            blend,
            first: 0,
        })
    }

    /// The blend of a run that changes to it before sample `first`. Each source continues after the
    /// samples that were read of it before, of which there are `num_before`.
    ///
    /// # Panics
    /// If there is not one number for each source.
    pub fn continued(self, first: u64, num_before: Vec<u64>) -> Self {
        assert_eq!(num_before.len(), self.sources.len(), "one number a source");
        Self {
            first,
            num_before,
            ..self
        }
    }

    /// The sources.
    pub fn sources(&self) -> &[S] {
        &self.sources
    }

    /// The share of each source in the samples.
    pub fn shares(&self) -> Vec<f64> {
        self.blend.shares()
    }

    /// The source of sample `index`, and its index among the samples of that source.
    ///
    /// # Panics
    /// If the sample is one before the blend was [changed to](Self::continued).
    pub fn source_at(&self, index: u64) -> (usize, u64) {
        let position = index.checked_sub(self.first);
        let position = position.expect("samples before a change are not read again");
        let (source, index) = self.blend.source_at(position);
        (source, self.num_before[source] + index)
    }

    /// How many of the samples before sample `end` of the run are of each source.
    ///
    /// # Panics
    /// As [`Self::source_at`].
    pub fn num_read(&self, end: u64) -> Vec<u64> {
        let num = end.checked_sub(self.first);
        let counts = self
            .blend
            .counts(num.expect("counts begin where the blend does"));
        let both = counts.into_iter().zip(&self.num_before);
        both.map(|(count, before)| count + before).collect()
    }
}

impl<S: Samples> Samples for BlendedSampler<S> {
    /// Number of samples before a source is read again.
    fn num_samples(&self) -> u64 {
        self.num_samples
    }

    fn order_hash(&self) -> u64 {
        order_hash_of(&self.sources)
    }

    fn sample(&self, index: u64) -> Result<Sample, DataError> {
        let (source, index) = self.source_at(index);
        self.sources[source].sample(index)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;
    use crate::{dataset::TokenDataset, sampler::Sampler};

    #[rstest]
    #[case(&[1.0])]
    #[case(&[0.7, 0.3])]
    #[case(&[5.0, 1.0, 1.0, 1e-8])]
    fn every_source_is_counted_from_zero_without_gaps(#[case] weights: &[f64]) {
        for seed in [1, 77] {
            let blend = Blend::new(weights, seed).unwrap();
            for first in [0, BLOCK - 1500, 7 * BLOCK - 3] {
                let mut next = vec![None; weights.len()];
                for position in first..first + 3000 {
                    let (source, index) = blend.source_at(position);
                    let expected = next[source].unwrap_or(index);
                    assert_eq!(index, expected, "{position}");
                    next[source] = Some(index + 1);
                }
                if first == 0 {
                    let total: u64 = next.iter().flatten().sum();
                    assert_eq!(total, 3000);
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn every_stretch_is_mixed_by_the_weights(
            weights in prop::collection::vec(0.05f64..1.0, 1..6), first in 0u64..1 << 40, seed: u64
        ) {
            let blend = Blend::new(&weights, seed).unwrap();
            let num = 1000;
            let mut counts = vec![0u64; weights.len()];
            for position in first..first + num {
                counts[blend.source_at(position).0] += 1;
            }
            for (count, share) in counts.into_iter().zip(blend.shares()) {
                // A random choice would be off by 16 at one standard deviation; here it is by a few
                // per binary digit of the length.
                let difference = (count as f64 - share * num as f64).abs();
                prop_assert!(difference < 20.0, "{count} of {num} for {share}");
            }
        }
    }

    #[test]
    fn a_window_has_one_place_in_each_part_of_the_slots() {
        let rng = PositionRng::new(3, Purpose::DataOrder, "blend").with_stream(2);
        for (bits, first) in [(4, 0), (10, 3 << 10), (12, BLOCK - (1 << 12))] {
            let mut parts: Vec<u64> = (first..first + (1 << bits))
                .map(|place| slot_of(rng, place) >> (BITS - bits))
                .collect();
            parts.sort_unstable();
            assert_eq!(parts, (0..1 << bits).collect::<Vec<_>>());
        }
    }

    #[test]
    fn places_below_a_slot_are_counted_without_looking_at_each() {
        let rng = PositionRng::new(3, Purpose::DataOrder, "blend").with_stream(2);
        for end in [0, 1, 1000, BLOCK / 3, BLOCK / 2, BLOCK - 1, BLOCK] {
            let mut count = 0;
            for num in 0..700 {
                assert_eq!(num_below(rng, num, end), count, "{num} places below {end}");
                count += u64::from(slot_of(rng, num) < end);
            }
        }
    }

    #[test]
    fn seeds_give_other_mixtures() {
        let sources = |seed| {
            let blend = Blend::new(&[1.0, 1.0], seed).unwrap();
            (0..64)
                .map(|position| blend.source_at(position).0)
                .collect::<Vec<_>>()
        };
        assert_eq!(sources(1), sources(1));
        assert_ne!(sources(1), sources(2));
    }

    #[rstest]
    #[case(&[1.0, 0.0], "the weight 0 cannot be used: it must be a positive number")]
    #[case(&[1.0, -2.0], "the weight -2 cannot be used: it must be a positive number")]
    #[case(&[f64::NAN], "the weight NaN cannot be used: it must be a positive number")]
    #[case(&[1.0, 1e-11], "the weight 0.00000000001 cannot be used: it is less than one sample")]
    fn a_weight_that_cannot_be_used_is_named(#[case] weights: &[f64], #[case] message: &str) {
        let error = Blend::new(weights, 1).unwrap_err().to_string();
        assert!(error.starts_with(message), "{error}");
    }

    #[test]
    fn each_source_keeps_its_own_order() {
        let sampler = |first: u32, len: u32| {
            let tokens: Vec<u32> = (first..first + len).collect();
            let set = TokenDataset::from_tokens("count", &tokens, 1000).unwrap();
            Sampler::shuffled(set, 3, 5).unwrap()
        };
        let parts = vec![sampler(0, 31), sampler(500, 100)];
        let blended = BlendedSampler::new(parts.clone(), Some(&[1.0, 2.0]), 5).unwrap();
        let mut read = [0, 0];
        for index in 0..200 {
            let tokens = blended.tokens(index).unwrap();
            let source = usize::from(tokens[0] >= 500);
            assert_eq!(tokens, parts[source].tokens(read[source]).unwrap());
            read[source] += 1;
        }
        assert!(read[0].abs_diff(67) < 5, "{read:?}");
        let num = blended.num_samples();
        let counts = blended.blend.counts(num);
        assert!(
            counts[0] <= 10 && counts[1] <= 33 && num >= 28,
            "{counts:?}"
        );
        assert_ne!(blended.blend.counts(num + 1), counts);
        // A third source is added after 200 samples, and the weights change.
        let more = [parts.clone(), vec![sampler(700, 50)]].concat();
        let changed = BlendedSampler::new(more.clone(), Some(&[3.0, 2.0, 4.0]), 5).unwrap();
        let before = blended.num_read(200);
        assert_eq!(before, read);
        let changed = changed.continued(200, [before, vec![0]].concat());
        let mut read = [read[0], read[1], 0];
        for index in 200..500 {
            assert_eq!(changed.num_read(index), read);
            let (source, number) = changed.source_at(index);
            assert_eq!(number, read[source], "{index}");
            assert_eq!(
                changed.tokens(index).unwrap(),
                more[source].tokens(number).unwrap()
            );
            read[source] += 1;
        }
        assert!(read[2].abs_diff(133) < 5, "{read:?}");
        let by_size = BlendedSampler::new(parts, None, 5).unwrap();
        assert!((by_size.shares()[0] - 10.0 / 43.0).abs() < 1e-5);
    }
}
