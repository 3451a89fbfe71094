use burn::tensor::{Device, Int, Tensor};

use super::{
    plan::Order,
    rows::{index, pad_rows, permute_rows, unpermute_rows},
};

/// An [`Order`], on the device.
#[derive(Debug)]
pub(super) struct RowPermutation {
    source_rows: Tensor<1, Int>,
    inverse: Tensor<2, Int>,
    is_padded: bool,
}

impl RowPermutation {
    /// `None` if rows are received as they are read.
    pub(super) fn new(order: &Order, device: &Device) -> Option<Self> {
        let source_rows = order.source_rows()?;
        Some(Self {
            source_rows: index(source_rows.iter().copied(), device),
            inverse: index(order.inverse(source_rows), device).unsqueeze_dim(1),
            is_padded: order.is_padded(),
        })
    }

    pub(super) fn permute(&self, x: Tensor<2>) -> Tensor<2> {
        // Padding reads a row of zeros after all others.
        let rows = x.dims()[0] + usize::from(self.is_padded);
        let [len] = self.source_rows.dims();
        permute_rows(pad_rows(x, rows), &self.source_rows, len)
    }

    /// The transpose of [`permute`](Self::permute).
    pub(super) fn unpermute(&self, y: Tensor<2>) -> Tensor<2> {
        unpermute_rows(y, self.inverse.clone())
    }
}
