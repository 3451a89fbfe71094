//! Hybrid context parallelism: sequences of uneven lengths, each on as many ranks as it needs.

use std::{cmp::Reverse, iter::successors};

use super::packed_batch::{Assignment, ContextShare, PackedBatch};
use crate::error::ParallelError;

/// Assigns sequences of uneven lengths to ranks, pass by pass.
///
/// 1. Each sequence needs the smallest power of two of ranks on which it has at most `max_tokens`
///    tokens per rank.
/// 2. Scheduling starts with the fewest passes that `max_tokens` allows, because a pass of few
///    tokens costs almost as much as one of many: weights are read, and gradients accumulated and
///    sent.
/// 3. Longest first, each sequence goes to the pass whose time it increases least: appended to an
///    assignment of the same number of ranks, or on idle ranks.
/// 4. A sequence that fits nowhere is appended to an assignment of more ranks, or else starts a
///    further pass.
/// 5. Idle ranks of a pass are given to the assignment with the most work, if that doubles its
///    ranks.
///
/// ```
/// use megaburn_parallel::HybridContextParallel;
///
/// let context = HybridContextParallel { num_ranks: 4, max_tokens: 100, multiple: 1, per_token: 1.0, per_pair: 0.1 };
/// let passes = context.passes(&[20, 180, 90, 30, 50])?;
/// // The longest on two ranks, the next on one, the short ones on the last.
/// let dealt: Vec<_> = passes[0].iter().map(|s| (s.ranks.clone(), s.sequences.clone())).collect();
/// assert_eq!(dealt, [(0..2, vec![1]), (2..3, vec![2]), (3..4, vec![4, 3, 0])]);
/// # Ok::<(), megaburn_parallel::ParallelError>(())
/// ```
///
/// Source: Megatron-LM `megatron/core/pipeline_parallel/hybrid_cp_schedule.py`
/// (`--hybrid-context-parallel`, `--max-seqlen-per-dp-cp-rank`). There, ranks take sequences as
/// they become free; here all ranks go from pass to pass together, so that communication for
/// sharded parameters and gradients is started by all at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HybridContextParallel {
    /// Number of ranks.
    pub num_ranks: usize,
    /// Most tokens of a pass on each rank.
    pub max_tokens: usize,
    /// Every chunk of a sequence is padded to a multiple of this many tokens. A sequence has one
    /// chunk on one rank, and two per rank on several.
    pub multiple: usize,
    /// Work per token, in any unit.
    pub per_token: f64,
    /// Work per pair of a query and a key that it attends to, in the same unit.
    pub per_pair: f64,
}

/// Number of distinct row lengths up to the longest. Few lengths mean few shapes.
const NUM_LENGTHS: usize = 64;

impl HybridContextParallel {
    /// The tokens of a sequence of `len` on `num_ranks` ranks together, padding included.
    pub fn padded(&self, len: usize, num_ranks: usize) -> usize {
        let chunks = if num_ranks == 1 { 1 } else { 2 * num_ranks };
        len.next_multiple_of(chunks * self.multiple)
    }

    /// The padded length of a row of `tokens`, which include the padding of its sequences, on
    /// `num_ranks` ranks. Each rank gets one of at most 65 lengths, so that there are few shapes
    /// and little padding.
    pub fn row_len(&self, tokens: usize, num_ranks: usize) -> usize {
        let chunks = if num_ranks == 1 { 1 } else { 2 } * self.multiple;
        let most = self.max_tokens / chunks * chunks;
        // The unit is the same for every number of ranks.
        let unit = self
            .max_tokens
            .div_ceil(NUM_LENGTHS)
            .next_multiple_of(2 * self.multiple);
        (tokens / num_ranks)
            .next_multiple_of(unit)
            .clamp(unit.min(most), most)
            * num_ranks
    }

    /// The work of these sequences for each of the `num_ranks` ranks that hold them, in units in
    /// which a sequence of one token is 1024.
    fn work(&self, lens: &[usize], sequences: &[usize], num_ranks: usize) -> u64 {
        let of = |index: &usize| {
            let len = lens[*index] as f64;
            let work = self.per_token * len + self.per_pair * len * (len + 1.0) / 2.0;
            // Integers, so that equal amounts of work compare as exactly equal.
            (1024.0 * work / (self.per_token + self.per_pair) / num_ranks as f64).ceil() as u64
        };
        sequences.iter().map(of).sum()
    }

    fn tokens(&self, lens: &[usize], sequences: &[usize], num_ranks: usize) -> usize {
        let of = |index: &usize| self.padded(lens[*index], num_ranks) / num_ranks;
        sequences.iter().map(of).sum()
    }

    /// The fewest ranks that hold a sequence of `len` tokens.
    ///
    /// # Errors
    /// The sequence is too long for all ranks together.
    pub fn needed(&self, len: usize) -> Result<usize, ParallelError> {
        let sizes = (0..)
            .map(|power| 1usize << power)
            .take_while(|size| *size <= self.num_ranks);
        let mut sizes = sizes.into_iter();
        sizes
            .find(|size| self.padded(len, *size) / size <= self.max_tokens)
            .ok_or_else(|| {
                let most = self.max_tokens;
                let ranks = 1usize << self.num_ranks.max(1).ilog2();
                let why = format!(
                    "a sequence of {len} tokens is too long for {ranks} ranks of {most} tokens \
                    each: raise parallel.max_tokens_per_rank to {} or more, or use more ranks",
                    self.padded(len, ranks).div_ceil(ranks)
                );
                let name = "passes".to_string();
                ParallelError::Config {
                    layer: "HybridContextParallel",
                    name,
                    why,
                }
            })
    }

    /// The shares of each pass. In each pass they cover all ranks in order; every sequence is in
    /// exactly one share.
    ///
    /// # Errors
    /// A sequence is too long for all ranks together.
    pub fn passes(&self, lens: &[usize]) -> Result<Vec<Vec<ContextShare>>, ParallelError> {
        let mut sequences = Vec::new();
        for (index, len) in lens.iter().enumerate() {
            sequences.push((index, self.needed(*len)?));
        }
        // Longest first; equal lengths keep their order.
        sequences.sort_by_key(|(index, _)| Reverse(lens[*index]));
        let tokens = sequences
            .iter()
            .map(|(index, ranks)| self.padded(lens[*index], *ranks));
        let fewest = tokens
            .sum::<usize>()
            .div_ceil((self.num_ranks * self.max_tokens).max(1));
        let empty = || PackedBatch::new(self.num_ranks, self.max_tokens);
        let mut passes: Vec<PackedBatch> = (0..fewest).map(|_| empty()).collect();
        for (index, num_ranks) in sequences {
            // Use more ranks than needed only where it avoids a further pass.
            let wider = successors(Some(num_ranks), |ranks| Some(2 * ranks));
            let widths = wider.take_while(|ranks| *ranks <= self.num_ranks);
            let is_put = widths.into_iter().any(|ranks| {
                let assignment = self.assignment(lens, vec![index], ranks);
                let alone = ranks == num_ranks;
                let places = passes.iter().enumerate();
                let places =
                    places.filter_map(|(at, pass)| Some((pass.place(&assignment, alone)?, at)));
                let best = places.min_by_key(|(place, _)| place.cost);
                best.map(|(place, at)| passes[at].put(assignment, place))
                    .is_some()
            });
            if !is_put {
                passes.push(empty().with(self.assignment(lens, vec![index], num_ranks)));
            }
        }
        passes.retain(|pass| !pass.drafts.is_empty());
        let wide = |mut pass: PackedBatch| {
            self.widen(lens, &mut pass);
            pass.shares()
        };
        Ok(passes.into_iter().map(wide).collect())
    }

    /// Gives idle ranks of a pass to the assignment with the most work.
    fn widen(&self, lens: &[usize], pass: &mut PackedBatch) {
        loop {
            let taken = pass.taken;
            let drafts = &mut pass.drafts;
            let Some(busiest) = drafts.iter_mut().max_by_key(|assignment| assignment.work) else {
                return;
            };
            let num_ranks = busiest.num_ranks;
            let wider = self.assignment(lens, busiest.sequences.clone(), 2 * num_ranks);
            // Widening a less busy assignment would not help: the pass still takes as long as the
            // busiest.
            if taken + num_ranks > self.num_ranks || wider.tokens > self.max_tokens {
                return;
            }
            *busiest = wider;
            pass.taken += num_ranks;
        }
    }

    fn assignment(&self, lens: &[usize], sequences: Vec<usize>, num_ranks: usize) -> Assignment {
        let tokens = self.tokens(lens, &sequences, num_ranks);
        let work = self.work(lens, &sequences, num_ranks);
        Assignment {
            num_ranks,
            sequences,
            tokens,
            work,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    fn context(num_ranks: usize, max_tokens: usize) -> HybridContextParallel {
        HybridContextParallel {
            num_ranks,
            max_tokens,
            multiple: 1,
            per_token: 1.0,
            per_pair: 0.01,
        }
    }

    proptest! {
        #[test]
        fn every_sequence_is_computed_once_and_no_rank_has_too_much(
            num_ranks in 1usize..20,
            max_tokens in 64usize..200,
            multiple in 1usize..4,
            shares in prop::collection::vec(0.0f64..1.0, 0..60),
        ) {
            let context = HybridContextParallel { multiple, ..context(num_ranks, max_tokens) };
            // One sequence may be the longest that fits, and the others form a long tail.
            let ranks = 1usize << num_ranks.ilog2();
            let unit = 2 * ranks * multiple;
            let longest = ranks * max_tokens / unit * unit;
            let lens: Vec<usize> =
                shares.iter().map(|x| (longest as f64 * x.powi(4)) as usize + 1).map(|x| x.min(longest.max(1))).collect();
            prop_assume!(longest > 0);
            let passes = context.passes(&lens).unwrap();
            let mut seen: Vec<usize> =
                passes.iter().flatten().flat_map(|share| share.sequences.clone()).collect();
            seen.sort_unstable();
            prop_assert!(seen.into_iter().eq(0..lens.len()));
            for shares in &passes {
                let mut end = 0;
                for ContextShare { ranks, sequences } in shares {
                    let size = ranks.len();
                    prop_assert_eq!(ranks.start, end);
                    prop_assert!(size.is_power_of_two() && ranks.start % size == 0);
                    end = ranks.end;
                    let tokens = context.tokens(&lens, sequences, size);
                    prop_assert!(tokens <= max_tokens);
                    let row = context.row_len(tokens * size, size);
                    let chunks = if size == 1 { 1 } else { 2 * size };
                    prop_assert!(row >= tokens * size && row.is_multiple_of(chunks * multiple));
                    prop_assert!(row / size <= max_tokens.max(multiple * 2));
                }
                prop_assert_eq!(end, num_ranks);
                prop_assert!(shares.iter().any(|share| !share.sequences.is_empty()));
            }
        }
    }

    /// The time of all passes, each as long as its busiest rank, relative to perfectly balanced
    /// work.
    fn slowdown(context: &HybridContextParallel, lens: &[usize]) -> f64 {
        let work = |share: &ContextShare| context.work(lens, &share.sequences, share.ranks.len());
        let passes = context.passes(lens).unwrap();
        let time: u64 = passes
            .iter()
            .filter_map(|shares| shares.iter().map(work).max())
            .sum();
        let all: Vec<usize> = (0..lens.len()).collect();
        time as f64 / context.work(lens, &all, context.num_ranks) as f64
    }

    #[test]
    fn work_is_balanced_where_it_can_be() {
        // 2 sequences of 4096 tokens, 18 of 700 and 180 of 30 to 209, on 8 ranks of 1024 tokens.
        let lens: Vec<usize> = (0..200)
            .map(|i| {
                if i < 2 {
                    4096
                } else if i < 20 {
                    700
                } else {
                    10 + i
                }
            })
            .collect();
        let found = slowdown(&context(8, 1024), &lens);
        assert!(found < 1.35, "{found}");
        // Equal sequences whose number is a multiple of the ranks lose nothing.
        assert!((slowdown(&context(4, 100), &[90; 12]) - 1.0).abs() < 1e-3);
        // A single sequence is split over all idle ranks.
        let passes = context(8, 1024).passes(&[1000]).unwrap();
        assert_eq!(
            passes,
            [vec![ContextShare {
                ranks: 0..8,
                sequences: vec![0]
            }]]
        );
    }

    #[rstest]
    #[case(2, 50, 1.05)]
    #[case(2, 400, 1.05)]
    #[case(4, 400, 1.12)]
    #[case(8, 1600, 1.05)]
    fn a_long_tail_takes_few_passes(#[case] ranks: usize, #[case] num: usize, #[case] slow: f64) {
        // Half of the sequences are shorter than 63 tokens, one in a hundred is longer than 500.
        let share = |index| (index as f64 + 0.5) / num as f64;
        let len = |index| 63.0 * (1.0 / share(index) - 1.0).powf(0.45);
        let lens: Vec<usize> = (0..num)
            .map(|i| len(i).clamp(1.0, 1024.0) as usize)
            .collect();
        let context = context(ranks, 1024);
        let fewest = lens.iter().sum::<usize>().div_ceil(ranks * 1024);
        assert_eq!(context.passes(&lens).unwrap().len(), fewest);
        let found = slowdown(&context, &lens);
        assert!(found < slow, "{found}");
    }

    #[rstest]
    #[case(2, 1100)]
    #[case(4, 1500)]
    #[case(8, 1100)]
    fn short_ones_fill_up_passes_of_long_ones(#[case] ranks: usize, #[case] long: usize) {
        let of = |index| if index % 10 == 0 { long } else { 50 };
        let lens: Vec<usize> = (0..60 * ranks).map(of).collect();
        // Each long sequence needs two ranks, which hold one at a time.
        assert_eq!(context(ranks, 1000).passes(&lens).unwrap().len(), 12);
    }

    #[rstest]
    fn rows_have_few_lengths(
        #[values(40, 1000, 4096, 10000, 13000)] max_tokens: usize,
        #[values(1, 3)] multiple: usize,
    ) {
        let context = HybridContextParallel {
            multiple,
            ..context(8, max_tokens)
        };
        let mut lens = std::collections::BTreeSet::new();
        for ranks in [1, 2, 4, 8] {
            let step = context.padded(1, ranks);
            for tokens in (0..=max_tokens * ranks).step_by(step) {
                let len = context.row_len(tokens, ranks);
                assert!(len >= tokens && len.is_multiple_of(step) && len <= max_tokens * ranks);
                lens.insert(len / ranks);
            }
        }
        assert!(lens.len() <= NUM_LENGTHS + 1, "{}", lens.len());
    }

    #[test]
    fn a_sequence_that_is_too_long_is_refused() {
        let error = context(6, 100).passes(&[10, 401]).unwrap_err().to_string();
        assert!(
            error.contains("401 tokens is too long for 4 ranks of 100 tokens each"),
            "{error}"
        );
        assert!(error.contains("max_tokens_per_rank to 102"), "{error}");
        assert!(context(6, 100).passes(&[400]).is_ok());
        assert!(context(6, 100).passes(&[]).unwrap().is_empty());
    }
}
