use std::sync::{Mutex, PoisonError};

use burn::tensor::{Int, Tensor};
use megaburn_kernels::{ExpertPermutation, permutation_by_expert};

use super::{
    rows::{permute_rows, truncate_rows, unpermute_rows},
    token_dispatcher::Payload,
};

/// Expert-sorted assignments, on the device, without those that go to no expert.
#[derive(Debug)]
pub(super) struct ExpertSorted {
    permutation: ExpertPermutation,
    num_rows: usize,
}

impl ExpertSorted {
    /// Gathers the expert-sorted rows of tokens or of assignments.
    pub(super) fn permute(&self, x: Tensor<2>, payload: Payload) -> Tensor<2> {
        let index = match payload {
            Payload::Tokens => &self.permutation.tokens,
            Payload::Assignments => &self.permutation.slots,
        };
        permute_rows(x, index, self.num_rows)
    }

    /// The transpose of [`permute`](Self::permute).
    pub(super) fn unpermute(&self, y: Tensor<2>, payload: Payload) -> Tensor<2> {
        let rows = self.permutation.rows.clone();
        unpermute_rows(
            y,
            match payload {
                Payload::Tokens => rows,
                Payload::Assignments => {
                    let [tokens, top_k] = rows.dims();
                    if tokens == 0 {
                        rows
                    } else {
                        rows.reshape([tokens * top_k, 1])
                    }
                }
            },
        )
    }

    /// Gathers the expert-sorted rows of integers per token.
    pub(super) fn permute_ids(&self, x: Tensor<2, Int>) -> Tensor<2, Int> {
        match self.num_rows {
            0 => Tensor::empty([0, x.dims()[1]], (&x.device(), x.dtype())),
            len => x.select(0, self.permutation.tokens.clone().narrow(0, 0, len)),
        }
    }

    /// Drops the unused rows of [`PendingCounts::prefetch`].
    pub(super) fn trim_prefetched(&self, prefetched: Tensor<2>) -> Tensor<2> {
        truncate_rows(prefetched, self.num_rows)
    }
}

/// Token rows that were [gathered early](PendingCounts::prefetch), until they are taken.
#[derive(Debug)]
pub(super) struct Prefetched(Mutex<Option<Tensor<2>>>);

impl Prefetched {
    pub(super) fn new(rows: Tensor<2>) -> Self {
        Self(Mutex::new(Some(rows)))
    }

    /// The rows, if `payload` asks for tokens and they were not taken before.
    pub(super) fn take(&self, payload: Payload) -> Option<Tensor<2>> {
        let mut prefetched = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        prefetched.take_if(|_| payload == Payload::Tokens)
    }
}

/// Expert-sorted assignments whose row count is still on the device.
pub(super) struct PendingCounts(ExpertPermutation);

impl PendingCounts {
    pub(super) fn new(experts: Tensor<2, Int>, num_experts: usize) -> Self {
        Self(permutation_by_expert(experts, num_experts))
    }

    /// Rows of each expert, on the device.
    pub(super) fn counts(&self) -> Tensor<1, Int> {
        self.0.counts.clone()
    }

    /// Gathers the rows of tokens, at most `max_per_token` per token. The rows after the actual
    /// count are unused: this runs on the device while the host still waits for that count.
    pub(super) fn prefetch(&self, x: Tensor<2>, max_per_token: usize) -> Tensor<2> {
        let [slots] = self.0.tokens.dims();
        let [tokens, _] = x.dims();
        permute_rows(x, &self.0.tokens, slots.min(max_per_token * tokens))
    }

    pub(super) fn with_rows(self, num_rows: usize) -> ExpertSorted {
        ExpertSorted {
            permutation: self.0,
            num_rows,
        }
    }
}
