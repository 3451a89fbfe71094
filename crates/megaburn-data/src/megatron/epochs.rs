//! The number of times that sequences are read for a number of samples.

use crate::error::DataError;

/// The epochs of a data set, and the samples that they give.
///
/// Source: `GPTDataset._get_num_epochs` and `_build_document_sample_shuffle_indices`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Epochs {
    /// Number of tokens of an epoch.
    pub(super) num_tokens: u64,
    pub(super) num_epochs: u64,
    /// Number of samples of all epochs.
    pub(super) num_samples: u64,
    /// Number of samples before the last epoch, if that one is shuffled on its own. It is if fewer
    /// than 80% of its samples are needed: a shuffle of all epochs would drop samples of each.
    pub(super) separate_from: Option<u64>,
}

impl Epochs {
    /// The fewest epochs that give `num_samples` samples; one epoch for `None`. `num_tokens` and
    /// `seq_len` are at least 1.
    ///
    /// # Errors
    /// The numbers are larger than Megatron-LM's integers.
    pub(super) fn new(
        num_tokens: u64,
        seq_len: u64,
        num_samples: Option<u64>,
    ) -> Result<Self, DataError> {
        let too_many = |what: String| DataError::OrderSize { why: what };
        let asked = num_samples.unwrap_or(0);
        let needed = asked.checked_mul(seq_len).and_then(|n| n.checked_add(1));
        let epochs = needed.map(|needed| needed.div_ceil(num_tokens).max(1));
        let all = epochs.and_then(|n| Some((n, n.checked_mul(num_tokens)?)));
        let Some((num_epochs, all)) = all.filter(|(n, _)| *n <= i32::MAX as u64) else {
            return Err(too_many(format!(
                "{asked} samples of {seq_len} tokens need more than {} epochs of {num_tokens} \
                 tokens; ask for fewer (train.steps)",
                i32::MAX
            )));
        };
        let samples_of = |num_tokens: u64| (num_tokens - 1) / seq_len;
        let mut separate_from = None;
        if num_epochs > 1 {
            let before = samples_of((num_epochs - 1) * num_tokens);
            let threshold = (0.8 * samples_of(num_tokens) as f64) as u64;
            separate_from = (asked - before < threshold).then_some(before);
        }
        Ok(Self {
            num_tokens,
            num_epochs,
            num_samples: samples_of(all),
            separate_from,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn epochs_are_as_few_as_possible(
            num_tokens in 1u64..300, seq_len in 1u64..50, asked in 1u64..200,
        ) {
            let epochs = Epochs::new(num_tokens, seq_len, Some(asked)).unwrap();
            prop_assert!(epochs.num_samples >= asked);
            let fewer = (epochs.num_epochs - 1) * num_tokens;
            prop_assert!(fewer.saturating_sub(1) / seq_len < asked || fewer == 0);
            if let Some(before) = epochs.separate_from {
                // The run needs the last epoch, but less than 80% of it.
                prop_assert!(before < asked);
                prop_assert!(((asked - before) * seq_len) as f64 <= 0.8 * num_tokens as f64);
            }
        }
    }

    #[test]
    fn numbers_that_are_too_large_are_refused() {
        for (num_tokens, asked) in [(1, 1 << 31), (1000, u64::MAX / 2), (1, u64::MAX)] {
            let error = Epochs::new(num_tokens, 8, Some(asked)).unwrap_err();
            assert!(
                error.to_string().contains("more than 2147483647 epochs"),
                "{error}"
            );
        }
        assert_eq!(Epochs::new(9, 4, None).unwrap().num_samples, 2);
    }
}
