//! What a block reads besides the residual stream.

use burn::tensor::Tensor;
use megaburn_parallel::{BatchContext, KvCache};

use super::rotary::Ropes;

/// What blocks read besides the residual stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockInputs<'a> {
    /// The tables of the positions.
    pub(super) ropes: &'a Ropes,
    /// The relative bias of the attention scores by distance.
    pub(super) bias: Option<&'a Tensor<3>>,
    /// The output of the encoder that blocks of a decoder attend to.
    pub(super) memory: Option<&'a Tensor<3>>,
    pub(super) batch: &'a BatchContext,
}

/// The keys and values of one block.
#[derive(Clone, Debug)]
pub(super) struct BlockCache {
    /// Those of the sequences.
    pub(super) own: KvCache,
    /// Those of the encoder's output, for cross attention.
    pub(super) memory: KvCache,
}
