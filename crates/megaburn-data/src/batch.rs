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
        self.global_batch_size / self.dp / self.micro_batch_size
    }

    /// The samples that rank `dp_rank` reads in the step that starts after `consumed` samples.
    ///
    /// # Panics
    /// If `dp_rank` is not below `dp`.
    pub fn rank(&self, consumed: u64, dp_rank: usize) -> Range<u64> {
        assert!(
            dp_rank < self.dp,
            "data-parallel rank {dp_rank} must be less than {}",
            self.dp
        );
        let share = (self.global_batch_size / self.dp) as u64;
        let first = consumed + dp_rank as u64 * share;
        first..first + share
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
        let size = self.micro_batch_size as u64;
        let first = self.rank(consumed, dp_rank).start + micro_batch as u64 * size;
        first..first + size
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
