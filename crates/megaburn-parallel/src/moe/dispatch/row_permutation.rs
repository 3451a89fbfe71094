use burn::tensor::{Device, Int, Tensor};

use super::{
    plan::Order,
    rows::{index, lengthened, summed, taken},
};

/// An [`Order`], on the device.
#[derive(Debug)]
pub(super) struct RowPermutation {
    places: Tensor<1, Int>,
    back: Tensor<2, Int>,
    is_padded: bool,
}

impl RowPermutation {
    /// `None` if rows are received as they are read.
    pub(super) fn new(order: &Order, device: &Device) -> Option<Self> {
        let places = order.places()?;
        Some(Self {
            places: index(places.iter().copied(), device),
            back: index(order.back(places), device).unsqueeze_dim(1),
            is_padded: order.is_padded(),
        })
    }

    pub(super) fn there(&self, x: Tensor<2>) -> Tensor<2> {
        // Padding reads a row of zeros after all others.
        let rows = x.dims()[0] + usize::from(self.is_padded);
        let [len] = self.places.dims();
        taken(lengthened(x, rows), &self.places, len)
    }

    /// The transpose of [`there`](Self::there).
    pub(super) fn back(&self, y: Tensor<2>) -> Tensor<2> {
        summed(y, self.back.clone())
    }
}
