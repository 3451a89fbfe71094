use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use burn::tensor::{DType, Int, Tensor, Transaction};

use super::quantile::{QUANTILE_BINS, count_quantiles};

/// The load of a router's experts on this rank since the last [`take`](Self::take). Copies of a
/// layer share it.
#[derive(Clone, Default)]
pub struct ExpertLoad(Arc<Mutex<LoadState>>);

#[derive(Default)]
struct LoadState {
    /// The counts that are already on the host.
    counts: LoadCounts,
    /// Tokens sent to each expert, on the device.
    tokens: Option<Tensor<1, Int>>,
    /// Sums over tokens, on the device: the losses, then the probabilities.
    sums: Option<Tensor<1>>,
    /// The share of the last global batch's assignments that each expert got; `None` before the
    /// first one.
    last: Option<Vec<f64>>,
}

/// Tokens and losses of a router, of one rank or summed over several.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoadCounts {
    /// Tokens that were sent to each expert, before any were dropped.
    pub tokens: Vec<u64>,
    /// Number of those assignments that were dropped.
    pub dropped: u64,
    /// The load-balancing loss of each micro-batch, times its tokens.
    pub aux_loss: f64,
    /// The load-balancing loss of each sequence, times its tokens.
    pub seq_aux_loss: f64,
    /// The sum of the squares of the logits' log-sum-exp.
    pub z_loss: f64,
    /// The sum of the probabilities of each expert, for a loss over all tokens.
    pub probabilities: Vec<f64>,
    /// The margins of each expert in [`QUANTILE_BINS`] bins, if they are counted.
    pub quantile_counts: Vec<u64>,
}

/// Number of losses whose sums precede the probabilities.
pub(super) const NUM_LOSSES: usize = 3;

impl ExpertLoad {
    /// Counts tokens, and adds sums over tokens: the losses, then the probabilities. Does not wait
    /// for the device.
    pub(super) fn add(&self, tokens: Tensor<1, Int>, dropped: u64, sums: Option<Tensor<1>>) {
        let mut state = self.lock();
        state.counts.dropped += dropped;
        state.tokens = Some(match state.tokens.take() {
            Some(before) => before + tokens,
            None => tokens,
        });
        if let Some(sums) = sums {
            state.sums = Some(match state.sums.take() {
                Some(before) => before + sums,
                None => sums,
            });
        }
    }

    /// Counts the margins of the tokens with these scores.
    pub(super) fn add_quantile_counts<'a>(
        &self,
        scores: impl Iterator<Item = &'a [f32]>,
        biases: &[f32],
        top_k: usize,
    ) {
        let quantile_counts = &mut self.lock().counts.quantile_counts;
        quantile_counts.resize(biases.len() * QUANTILE_BINS, 0);
        count_quantiles(scores, biases, top_k, quantile_counts);
    }

    /// Returns the counts since the last call. Waits for the device.
    ///
    /// # Errors
    /// The device cannot be read.
    pub fn take(&self) -> Result<LoadCounts, String> {
        let (mut counts, tokens, sums) = {
            let mut state = self.lock();
            (
                std::mem::take(&mut state.counts),
                state.tokens.take(),
                state.sums.take(),
            )
        };
        let Some(tokens) = tokens else {
            return Ok(counts);
        };
        let mut read = Transaction::default().register(tokens);
        if let Some(sums) = sums {
            read = read.register(sums.cast(DType::F32));
        }
        let read = read.try_execute().map_err(|error| error.to_string())?;
        counts.tokens = read[0].iter::<u64>().collect();
        if let Some(sums) = read.get(1) {
            let sums: Vec<f64> = sums.iter::<f64>().collect();
            let (losses, probabilities) = sums.split_at(NUM_LOSSES);
            [counts.aux_loss, counts.seq_aux_loss, counts.z_loss] =
                losses.try_into().expect("the number of losses matches");
            counts.probabilities = probabilities.to_vec();
        }
        Ok(counts)
    }

    /// The share of the last global batch's assignments that each expert got, from which the
    /// gradient of the loss over global batches is computed.
    pub fn last(&self) -> Option<Vec<f64>> {
        self.lock().last.clone()
    }

    /// Sets those shares, for the next batch or when a run resumes. They add up to 1.
    pub fn set_last(&self, last: Option<Vec<f64>>) {
        self.lock().last = last;
    }

    fn lock(&self) -> MutexGuard<'_, LoadState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for ExpertLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ExpertLoad")
            .field(&self.lock().counts)
            .finish()
    }
}
