//! Layers whose tokens are split over the ranks that split the weight (sequence parallelism).

use std::fmt::Debug;
use std::sync::Arc;

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{Int, Shape, Tensor};
use megaburn_autograd::IntoPrimitive;

use super::recipe::MatrixRole;

/// The collectives over the ranks that have shards of the same tokens.
///
/// # Collective
/// All of these ranks call each function together, by the thread that runs the pass.
pub trait ShardCollectives: Debug + Send + Sync {
    /// The number of ranks.
    fn num_ranks(&self) -> usize;

    /// Concatenates the ranks' rows in the order of ranks; every rank gets all of them.
    ///
    /// # Shapes
    /// `[rows, cols]` in f32, the same on every rank, to `[ranks * rows, cols]`
    fn gather(&self, own: Tensor<2>) -> Tensor<2>;

    /// As [`gather`](Self::gather), of bytes.
    fn gather_bytes(&self, own: Tensor<2, Int>) -> Tensor<2, Int>;

    /// Sums the ranks' tensors and returns this rank's rows of the sum.
    ///
    /// # Shapes
    /// `[ranks * rows, cols]`, the same on every rank, to `[rows, cols]`
    fn reduce_scatter(&self, partial: Tensor<2>) -> Tensor<2>;
}

/// The tokens of a layer that are split over the ranks which split its weight. The layer quantises
/// this rank's shard and gathers the elements of all shards, in a byte each, so that the products are
/// those of all tokens.
///
/// All ranks must derive the scale of the matrix from the largest magnitude of the whole matrix: its
/// [source](crate::AmaxSource) reduces over these ranks too.
///
/// Source: Transformer Engine, `gather_along_first_dim` of quantised tensors.
#[derive(Clone, Debug)]
pub struct SequenceShards {
    /// The matrix of which a rank has a shard of the tokens: the input, where the weight is split by
    /// output features (the gradient of the input is then reduce-scattered), or the gradient of the
    /// result, where it is split by input features (the result is).
    pub of: MatrixRole,
    /// The ranks.
    pub over: Arc<dyn ShardCollectives>,
}

impl SequenceShards {
    /// The sum of the ranks' tensors of all tokens, of which this rank keeps its own tokens.
    ///
    /// # Shapes
    /// `[seq, ..]` to `[seq / ranks, ..]`
    pub(super) fn reduce_scattered<B: IntoPrimitive>(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        let mut shape = x.shape();
        let wide = shape.num_elements() / shape[0].max(1);
        let x = B::float_reshape(x, Shape::new([shape[0], wide]));
        let own = self.over.reduce_scatter(B::wrap(x));
        shape[0] = own.dims()[0];
        B::float_reshape(B::unwrap(own), shape)
    }
}
