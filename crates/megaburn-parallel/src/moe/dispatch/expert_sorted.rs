use std::sync::{Mutex, PoisonError};

use burn::tensor::{Int, Tensor};
use megaburn_kernels::{ExpertPermutation, permutation_by_expert};

use super::{
    rows::{shortened, summed, taken},
    token_dispatcher::Payload,
};

/// Expert-sorted assignments, on the device, without the slots that go to no expert.
#[derive(Debug)]
pub(super) struct ExpertSorted {
    of: ExpertPermutation,
    num_rows: usize,
}

impl ExpertSorted {
    /// Gathers the expert-sorted rows of tokens or of slots.
    pub(super) fn there(&self, x: Tensor<2>, of: Payload) -> Tensor<2> {
        let index = match of {
            Payload::Tokens => &self.of.tokens,
            Payload::Assignments => &self.of.slots,
        };
        taken(x, index, self.num_rows)
    }

    /// The transpose of [`there`](Self::there).
    pub(super) fn back(&self, y: Tensor<2>, of: Payload) -> Tensor<2> {
        let rows = self.of.rows.clone();
        summed(
            y,
            match of {
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
    pub(super) fn numbers(&self, x: Tensor<2, Int>) -> Tensor<2, Int> {
        match self.num_rows {
            0 => Tensor::empty([0, x.dims()[1]], (&x.device(), x.dtype())),
            len => x.select(0, self.of.tokens.clone().narrow(0, 0, len)),
        }
    }

    /// The rows of tokens that were [gathered early](PendingCounts::ahead).
    pub(super) fn prefetch_numbers(&self, ahead: Tensor<2>) -> Tensor<2> {
        shortened(ahead, self.num_rows)
    }
}

/// Token rows that were [gathered early](PendingCounts::ahead), until they are taken.
#[derive(Debug)]
pub(super) struct Prefetched(Mutex<Option<Tensor<2>>>);

impl Prefetched {
    pub(super) fn new(rows: Tensor<2>) -> Self {
        Self(Mutex::new(Some(rows)))
    }

    /// The rows, if `of` asks for tokens and they were not taken before.
    pub(super) fn take(&self, of: Payload) -> Option<Tensor<2>> {
        let mut ahead = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ahead.take_if(|_| of == Payload::Tokens)
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

    /// Gathers the rows of tokens, at most `most` per token. The rows after the actual count are
    /// unused: this runs on the device while the host still waits for that count.
    pub(super) fn ahead(&self, x: Tensor<2>, most: usize) -> Tensor<2> {
        let [slots] = self.0.tokens.dims();
        let [tokens, _] = x.dims();
        taken(x, &self.0.tokens, slots.min(most * tokens))
    }

    pub(super) fn with_rows(self, num_rows: usize) -> ExpertSorted {
        ExpertSorted {
            of: self.0,
            num_rows,
        }
    }
}
