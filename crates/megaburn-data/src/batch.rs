//! Assigns the samples of a step to data-parallel ranks and micro-batches.

use std::ops::Range;

use crate::error::DataError;

/// The samples of a step, distributed over data-parallel ranks and micro-batches.
///
/// A step that starts after `consumed` samples reads the samples
/// `[consumed, consumed + global_batch_size)`. They are divided into `dp` equal ranges, one per
/// rank in rank order; each rank divides its range into micro-batches of `micro_batch_size`.
/// Micro-batch `j` of rank `r` therefore starts at sample `consumed + r * global_batch_size / dp +
/// j * micro_batch_size`.
///
/// A step reads the same set of samples for any `dp` and `micro_batch_size`. Rank order, then
/// micro-batch order, is the global order.
///
/// Ranks that differ only in tp, cp or pp read the same samples.
///
/// A [padded](Self::padded) step has any number of samples. The ranges are then as long as if it had
/// enough for all micro-batches, and the last ones are cut. A micro-batch that would lie beyond the
/// last sample reads the ones before it instead, and [`counted`](Self::counted) says which of the
/// samples that it reads count in the loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GlobalBatch {
    global_batch_size: usize,
    micro_batch_size: usize,
    dp: usize,
}

impl GlobalBatch {
    /// A step of `global_batch_size` samples, in micro-batches of `micro_batch_size` on each of
    /// `dp` ranks.
    ///
    /// # Errors
    /// An argument is zero, or `global_batch_size` is not a multiple of `micro_batch_size * dp`.
    pub fn new(
        global_batch_size: usize,
        micro_batch_size: usize,
        dp: usize,
    ) -> Result<Self, DataError> {
        let sizes = [
            ("the global batch size", global_batch_size),
            ("the micro-batch size", micro_batch_size),
            ("the data-parallel degree", dp),
        ];
        if let Some((what, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(DataError::Zero { what });
        }
        if !global_batch_size.is_multiple_of(micro_batch_size * dp) {
            return Err(DataError::Batch {
                global_batch_size,
                micro_batch_size,
                dp,
            });
        }
        Ok(Self {
            global_batch_size,
            micro_batch_size,
            dp,
        })
    }

    /// As [`new`](Self::new), for any `global_batch_size` that is at least `micro_batch_size`.
    ///
    /// # Errors
    /// An argument is zero, or `global_batch_size` is less than `micro_batch_size`.
    pub fn padded(
        global_batch_size: usize,
        micro_batch_size: usize,
        dp: usize,
    ) -> Result<Self, DataError> {
        // Checks the arguments other than the global batch size.
        let samples = micro_batch_size.saturating_mul(dp).max(1);
        let whole = Self::new(samples, micro_batch_size, dp)?;
        if global_batch_size < micro_batch_size {
            return Err(DataError::SmallBatch {
                global_batch_size,
                micro_batch_size,
            });
        }
        Ok(Self {
            global_batch_size,
            ..whole
        })
    }

    /// Whether some micro-batches have samples that do not count.
    pub fn has_padding(&self) -> bool {
        let samples = self.micro_batch_size * self.dp;
        !self.global_batch_size.is_multiple_of(samples)
    }

    /// Number of samples of a step, over all ranks.
    pub fn global_batch_size(&self) -> usize {
        self.global_batch_size
    }

    /// Number of samples of a micro-batch.
    pub fn micro_batch_size(&self) -> usize {
        self.micro_batch_size
    }

    /// Number of data-parallel ranks.
    pub fn dp(&self) -> usize {
        self.dp
    }

    /// Number of micro-batches of a rank in a step.
    pub fn num_micro_batches(&self) -> usize {
        let samples = self.micro_batch_size * self.dp;
        self.global_batch_size.div_ceil(samples)
    }

    /// The counted samples of rank `dp_rank` in the step that starts after `consumed` samples.
    ///
    /// # Panics
    /// If `dp_rank` is not below `dp`.
    pub fn rank(&self, consumed: u64, dp_rank: usize) -> Range<u64> {
        assert!(
            dp_rank < self.dp,
            "data-parallel rank {dp_rank} must be less than {}",
            self.dp
        );
        let share = self.num_micro_batches() * self.micro_batch_size;
        self.cut(consumed, dp_rank * share, share)
    }

    /// `len` samples from the `first` one of a step, without those beyond its last one.
    fn cut(&self, consumed: u64, first: usize, len: usize) -> Range<u64> {
        let [first, end] = [first, first + len].map(|at| at.min(self.global_batch_size) as u64);
        consumed + first..consumed + end
    }

    /// Which samples of a micro-batch of rank `dp_rank` count: all, unless the step is padded.
    ///
    /// # Panics
    /// As [`micro_batch`](Self::micro_batch).
    pub fn counted(&self, consumed: u64, dp_rank: usize, micro_batch: usize) -> Range<usize> {
        let read = self.micro_batch(consumed, dp_rank, micro_batch);
        let share = self.num_micro_batches() * self.micro_batch_size;
        let first = dp_rank * share + micro_batch * self.micro_batch_size;
        let counted = self.cut(consumed, first, self.micro_batch_size);
        (counted.start - read.start) as usize..(counted.end - read.start) as usize
    }

    /// The samples of one micro-batch of rank `dp_rank`.
    ///
    /// # Panics
    /// If `dp_rank` is not below `dp`, or `micro_batch` is not below [`Self::num_micro_batches`].
    pub fn micro_batch(&self, consumed: u64, dp_rank: usize, micro_batch: usize) -> Range<u64> {
        let num = self.num_micro_batches();
        assert!(
            micro_batch < num,
            "micro-batch {micro_batch} must be less than {num}"
        );
        assert!(
            dp_rank < self.dp,
            "data-parallel rank {dp_rank} must be less than {}",
            self.dp
        );
        let size = self.micro_batch_size;
        let first = (dp_rank * num + micro_batch) * size;
        let first = first.min(self.global_batch_size - size);
        self.cut(consumed, first, size)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    proptest! {
        #[test]
        fn a_step_is_read_once_and_in_order_by_any_layout(
            dp in 1usize..9, micro in 1usize..5, num_micro in 1usize..6, consumed in 0u64..10_000
        ) {
            let batch = GlobalBatch::new(dp * micro * num_micro, micro, dp).unwrap();
            prop_assert_eq!(batch.num_micro_batches(), num_micro);
            let read: Vec<u64> = (0..dp)
                .flat_map(|r| (0..num_micro).flat_map(move |j| batch.micro_batch(consumed, r, j)))
                .collect();
            let whole: Vec<u64> =
                (consumed..consumed + batch.global_batch_size() as u64).collect();
            prop_assert_eq!(read, whole);
        }

        #[test]
        fn each_sample_of_a_padded_step_counts_once(
            dp in 1usize..9, micro in 1usize..5, more in 0usize..40, consumed in 0u64..10_000
        ) {
            let global = micro + more;
            let batch = GlobalBatch::padded(global, micro, dp).unwrap();
            let num_micro = batch.num_micro_batches();
            prop_assert_eq!(batch.has_padding(), num_micro * micro * dp > global);
            let mut counts = Vec::new();
            for r in 0..dp {
                let mut of_rank = Vec::new();
                for j in 0..num_micro {
                    let read: Vec<u64> = batch.micro_batch(consumed, r, j).collect();
                    prop_assert_eq!(read.len(), micro);
                    prop_assert!(read[0] >= consumed);
                    prop_assert!(read[micro - 1] < consumed + global as u64);
                    of_rank.extend_from_slice(&read[batch.counted(consumed, r, j)]);
                }
                prop_assert_eq!(&of_rank, &batch.rank(consumed, r).collect::<Vec<_>>());
                counts.extend(of_rank);
            }
            let whole: Vec<u64> = (consumed..consumed + global as u64).collect();
            prop_assert_eq!(counts, whole);
        }
    }

    #[test]
    fn a_padded_step_has_the_samples_of_a_micro_batch() {
        let error = GlobalBatch::padded(3, 4, 2).unwrap_err().to_string();
        let message = "a global batch of 3 samples is smaller than a micro-batch of 4";
        assert_eq!(error, message);
        let zero = GlobalBatch::padded(8, 4, 0).unwrap_err().to_string();
        assert_eq!(zero, "the data-parallel degree is 0 but must be at least 1");
    }

    #[rstest]
    #[case(
        10,
        2,
        2,
        "a global batch of 10 samples is not divisible by micro-batch 2 x dp 2 = 4; use 12"
    )]
    #[case(
        3,
        2,
        4,
        "a global batch of 3 samples is not divisible by micro-batch 2 x dp 4 = 8; use 8"
    )]
    #[case(0, 2, 4, "the global batch size is 0 but must be at least 1")]
    #[case(8, 0, 4, "the micro-batch size is 0 but must be at least 1")]
    #[case(8, 2, 0, "the data-parallel degree is 0 but must be at least 1")]
    fn batches_that_cannot_be_shared_out_are_refused(
        #[case] global: usize,
        #[case] micro: usize,
        #[case] dp: usize,
        #[case] message: &str,
    ) {
        assert_eq!(
            GlobalBatch::new(global, micro, dp).unwrap_err().to_string(),
            message
        );
    }
}
