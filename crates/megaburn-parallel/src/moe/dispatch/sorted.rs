use burn::tensor::{Device, Int, Tensor};
use megaburn_kernels::{ExpertRows, rows_by_expert};

use super::{
    Of,
    plan::Order,
    rows::{index, lengthened, shortened, summed, taken},
};

/// Slots in the order of their experts, as far as they have one: on the device.
#[derive(Debug)]
pub(super) struct Sorted {
    of: ExpertRows,
    num_rows: usize,
}

impl Sorted {
    /// The rows that tokens send, or slots.
    pub(super) fn there(&self, x: Tensor<2>, of: Of) -> Tensor<2> {
        let index = match of {
            Of::Tokens => &self.of.tokens,
            Of::Slots => &self.of.slots,
        };
        taken(x, index, self.num_rows)
    }

    /// What was [taken ahead](Unread::ahead) of tokens.
    pub(super) fn of_ahead(&self, ahead: Tensor<2>) -> Tensor<2> {
        shortened(ahead, self.num_rows)
    }

    /// Its transpose.
    pub(super) fn back(&self, y: Tensor<2>, of: Of) -> Tensor<2> {
        let rows = self.of.rows.clone();
        summed(
            y,
            match of {
                Of::Tokens => rows,
                Of::Slots => {
                    let [tokens, top_k] = rows.dims();
                    if tokens == 0 { rows } else { rows.reshape([tokens * top_k, 1]) }
                }
            },
        )
    }
}

/// Slots in the order of their experts, of which nobody knows yet how many have one.
pub(super) struct Unread(ExpertRows);

impl Unread {
    pub(super) fn new(experts: Tensor<2, Int>, num_experts: usize) -> Self {
        Self(rows_by_expert(experts, num_experts))
    }

    /// Rows of each expert, on the device.
    pub(super) fn counts(&self) -> Tensor<1, Int> {
        self.0.counts.clone()
    }

    /// The rows that tokens send, and behind them some that they do not: what the device can do while the host waits
    /// for the number of those.
    pub(super) fn ahead(&self, x: Tensor<2>) -> Tensor<2> {
        let [slots] = self.0.tokens.dims();
        taken(x, &self.0.tokens, slots)
    }

    pub(super) fn with_rows(self, num_rows: usize) -> Sorted {
        Sorted { of: self.0, num_rows }
    }
}

/// An [`Order`], on the device.
#[derive(Debug)]
pub(super) struct Arranged {
    places: Tensor<1, Int>,
    back: Tensor<2, Int>,
    is_padded: bool,
}

impl Arranged {
    /// None: rows stand as they are read.
    pub(super) fn new(order: &Order, device: &Device) -> Option<Self> {
        let arranged = || Self {
            places: index(order.places.iter().copied(), device),
            back: index(order.back(), device).unsqueeze_dim(1),
            is_padded: order.is_padded(),
        };
        (!order.is_as_they_are()).then(arranged)
    }

    pub(super) fn there(&self, x: Tensor<2>) -> Tensor<2> {
        // Padding is the row behind all others.
        let rows = x.dims()[0] + usize::from(self.is_padded);
        let [len] = self.places.dims();
        taken(lengthened(x, rows), &self.places, len)
    }

    /// Its transpose.
    pub(super) fn back(&self, y: Tensor<2>) -> Tensor<2> {
        summed(y, self.back.clone())
    }
}
