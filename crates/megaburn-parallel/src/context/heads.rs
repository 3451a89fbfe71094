//! Exchanges heads for sequence and back. Neighbours split their heads among each other, and each
//! then holds the full span of the sequence that they hold together.
//!
//! Source: Jacobs et al. (2023), "DeepSpeed Ulysses", <https://arxiv.org/abs/2309.14509>.

use std::sync::Arc;

use burn::tensor::Tensor;
use megaburn_collective::{Group, region::all_to_all};
use megaburn_mesh::Zigzag;

use super::{
    ContextParallel, Mask,
    order::{Order, Span},
};

/// Converts between this rank's chunks with all its heads, and its share of the heads for all of
/// the neighbours' chunks.
#[derive(Debug)]
pub(super) struct Heads {
    group: Group,
    order: Option<Arc<Order>>,
}

impl Heads {
    /// Prepares the exchange for tensors with the shape of `like`, `[len, b, heads, d]`.
    pub(super) fn new(parallel: &ContextParallel, mask: &Mask, like: &Tensor<4>) -> Self {
        let ContextParallel { group, heads, .. } = parallel;
        let [len, b, ..] = like.dims();
        let order = (heads.size() > 1).then(|| {
            let first = group.rank() - heads.rank();
            let members = (first..first + heads.size()).map(|rank| Zigzag::new(rank, group.size()));
            let span = Span {
                members: members.collect(),
                whole: parallel.sequence_chunk(),
            };
            mask.order(span, [len, b], &like.device())
        });
        Self {
            group: heads.clone(),
            order,
        }
    }

    /// Gathers the neighbours' chunks and keeps this rank's share of the heads.
    ///
    /// # Shapes
    /// `[len, b, heads, d]` to `[n len, b, heads / n, d]`
    pub(super) fn share(&self, x: Tensor<4>) -> Tensor<4> {
        match &self.order {
            None => x,
            Some(order) => order.to_sequence(all_to_all(x, 2, 0, &self.group)),
        }
    }

    /// The inverse of [`share`](Self::share).
    pub(super) fn join(&self, x: Tensor<4>) -> Tensor<4> {
        match &self.order {
            None => x,
            Some(order) => all_to_all(order.to_members(x), 0, 2, &self.group),
        }
    }
}
