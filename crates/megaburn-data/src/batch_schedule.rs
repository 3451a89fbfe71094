//! The number of samples of each step.

use serde::Serialize;

use crate::error::DataError;

/// The global batch size of each step, as a pure function of the number of samples consumed before
/// the step. A resumed run therefore needs no saved state for it.
///
/// Source: Megatron-LM `megatron/core/num_microbatches_calculator.py`.
///
/// ```
/// use megaburn_data::BatchSchedule;
///
/// // 32 samples, 64 after 1000, 96 after 2000.
/// let schedule = BatchSchedule::ramp(32, 32, 2000, 96)?;
/// assert_eq!([0, 999, 1000, 5000].map(|read| schedule.batch_size(read)), [32, 32, 64, 96]);
/// # Ok::<(), megaburn_data::DataError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct BatchSchedule {
    start: usize,
    increment: usize,
    /// How many times the batch grows.
    increments: u64,
    /// Number of samples over which the batch grows.
    samples: u64,
}

impl BatchSchedule {
    /// A batch size that never changes.
    ///
    /// # Errors
    /// `batch` is 0.
    pub fn constant(batch: usize) -> Result<Self, DataError> {
        Self::ramp(batch, 1, 0, batch)
    }

    /// A batch ramp from `start` to `end` samples per step. The batch grows by `increment` at equal
    /// intervals over the first `samples` samples (Megatron's
    /// `--rampup-batch-size start increment samples`).
    ///
    /// # Errors
    /// `start` or `increment` is 0, `start` is above `end`, or `end - start` is not a multiple of
    /// `increment`.
    pub fn ramp(
        start: usize,
        increment: usize,
        samples: u64,
        end: usize,
    ) -> Result<Self, DataError> {
        for (what, size) in [
            ("the first batch size", start),
            ("the batch increment", increment),
        ] {
            if size == 0 {
                return Err(DataError::Zero { what });
            }
        }
        let distance = end
            .checked_sub(start)
            .filter(|distance| distance % increment == 0);
        let Some(distance) = distance else {
            return Err(DataError::Ramp {
                start,
                increment,
                end,
            });
        };
        let increments = (distance / increment) as u64;
        Ok(Self {
            start,
            increment,
            increments,
            samples,
        })
    }

    /// The batch size of the step that starts after `consumed` samples.
    pub fn batch_size(&self, consumed: u64) -> usize {
        let Self {
            start,
            increment,
            increments,
            samples,
        } = *self;
        let grown = if consumed < samples {
            (u128::from(consumed) * u128::from(increments) / u128::from(samples)) as u64
        } else {
            increments
        };
        start + grown as usize * increment
    }

    /// The batch size after the ramp.
    pub fn largest(&self) -> usize {
        self.batch_size(u64::MAX)
    }

    /// The total number of samples that the first `updates` steps read.
    pub fn samples_after(&self, updates: u64) -> u64 {
        let mut consumed = 0u64;
        let mut left = updates;
        while left > 0 {
            let batch = self.batch_size(consumed) as u64;
            let steps = self
                .next_growth(consumed)
                .map_or(left, |at| (at - consumed).div_ceil(batch).min(left));
            consumed = consumed.saturating_add(steps.saturating_mul(batch));
            left -= steps;
        }
        consumed
    }

    /// The number of consumed samples at which the batch next grows, given `consumed`; `None` after
    /// the ramp.
    fn next_growth(&self, consumed: u64) -> Option<u64> {
        let Self {
            start,
            increment,
            increments,
            samples,
        } = *self;
        let grown = ((self.batch_size(consumed) - start) / increment) as u64;
        let at = |grown: u64| {
            let exact = u128::from(grown) * u128::from(samples);
            exact.div_ceil(u128::from(increments)) as u64
        };
        (grown < increments).then(|| at(grown + 1))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    /// Megatron's rule, transcribed from its file.
    fn megatrons(ramp: (usize, usize, u64, usize), consumed: u64) -> usize {
        let (start, increment, samples, end) = ramp;
        let increments = (end - start) / increment;
        if consumed > samples || increments == 0 {
            return end;
        }
        // Megatron computes `consumed / (samples / increments)` in floats and rounds down; this is
        // exact.
        start + (consumed * increments as u64 / samples) as usize * increment
    }

    proptest! {
        #[test]
        fn batches_are_megatrons_and_add_up(
            start in 1usize..50,
            increment in 1usize..20,
            increments in 0usize..20,
            samples in 1u64..10_000,
            consumed in 0u64..20_000,
            updates in 0u64..300,
        ) {
            let end = start + increment * increments;
            let schedule = BatchSchedule::ramp(start, increment, samples, end).unwrap();
            let expected = megatrons((start, increment, samples, end), consumed);
            prop_assert_eq!(schedule.batch_size(consumed), expected);
            let sum = (0..updates).fold(0, |sum, _| sum + schedule.batch_size(sum) as u64);
            prop_assert_eq!(schedule.samples_after(updates), sum);
        }
    }

    #[test]
    fn a_ramp_over_no_samples_is_at_its_end() {
        let schedule = BatchSchedule::ramp(2, 3, 0, 8).unwrap();
        assert_eq!((schedule.batch_size(0), schedule.samples_after(5)), (8, 40));
    }

    #[test]
    fn a_constant_batch_stays() {
        let schedule = BatchSchedule::constant(8).unwrap();
        assert_eq!(
            [0, 1, u64::MAX].map(|read| schedule.batch_size(read)),
            [8; 3]
        );
        assert_eq!(schedule.samples_after(1200), 9600);
        assert_eq!(schedule.largest(), 8);
        assert_eq!(schedule.samples_after(u64::MAX), u64::MAX);
    }

    #[test]
    fn a_ramp_of_many_increments_takes_no_room() {
        let schedule = BatchSchedule::ramp(1, 1, u64::MAX, 1 << 40).unwrap();
        assert_eq!(schedule.batch_size(u64::MAX / 2), 1 << 39);
        assert_eq!(schedule.samples_after(1000), 1000);
        assert_eq!(schedule.largest(), 1 << 40);
    }

    #[rstest]
    #[case(0, 8, 64, "the first batch size is 0 but must be at least 1")]
    #[case(8, 0, 64, "the batch increment is 0 but must be at least 1")]
    #[case(
        128,
        8,
        64,
        "the batch size cannot grow from 128 to 64 samples in steps of 8; start at or below 64, with a difference that is a multiple of 8"
    )]
    #[case(
        10,
        8,
        64,
        "the batch size cannot grow from 10 to 64 samples in steps of 8"
    )]
    fn a_ramp_that_does_not_arrive_is_refused(
        #[case] start: usize,
        #[case] increment: usize,
        #[case] end: usize,
        #[case] message: &str,
    ) {
        let error = BatchSchedule::ramp(start, increment, 1000, end)
            .unwrap_err()
            .to_string();
        assert!(error.contains(message), "{error}");
    }
}
