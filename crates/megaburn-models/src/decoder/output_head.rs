//! The output head and the loss that a family may have of its own.

use burn::{module::Module, prelude::Int, tensor::Tensor};
use megaburn_collective::Group;
use megaburn_parallel::{CrossEntropy, Sharded, VocabParallelBias, VocabParallelEmbedding};

/// A family's own layers between the last norm and the logits. They belong to the last pipeline
/// stage, at the path `output_head` of the model. All their parameters are floats with at most four
/// dimensions.
///
/// This is BERT's head for masked language modelling:
///
/// ```
/// use burn::{module::Module, tensor::{Tensor, activation::gelu}};
/// use megaburn_models::decoder::{FamilyHead, HeadParts, OutputHead};
/// use megaburn_parallel::{
///     Norm, ParallelError, ReplicatedLinear, Sharded, VocabParallelBias, VocabParallelEmbedding,
/// };
///
/// #[derive(Module, Sharded, Debug)]
/// struct MaskedHead {
///     dense: ReplicatedLinear,
///     norm: Norm,
///     vocab: VocabParallelBias,
/// }
///
/// impl OutputHead for MaskedHead {
///     fn logits(&self, x: Tensor<3>, output: &VocabParallelEmbedding) -> Tensor<3> {
///         let x = self.norm.forward(gelu(self.dense.forward(x)));
///         output.logits_with_bias(x, &self.vocab)
///     }
/// }
///
/// /// What `ModelFamily::head` returns.
/// fn head(parts: &HeadParts<'_>) -> Result<FamilyHead, ParallelError> {
///     let hidden = parts.config().hidden;
///     Ok(FamilyHead::new(MaskedHead {
///         dense: parts.linear("dense", hidden, hidden)?,
///         norm: parts.norm(),
///         vocab: parts.vocab_bias()?,
///     }))
/// }
/// ```
pub trait OutputHead: Module + Sharded + 'static {
    /// The logits of this rank's part of the vocabulary. `output` is the output projection: the
    /// model's own, or the embedding if they are tied.
    ///
    /// # Shapes
    /// x `[S, B, H]`, the output of the last norm (with sequence parallelism `[S / n, B, H]`);
    /// output `[S, B, V / n]`
    /// # Collective
    /// All members of the tensor-parallel group, with the collectives of the layers.
    fn logits(&self, x: Tensor<3>, output: &VocabParallelEmbedding) -> Tensor<3>;

    /// Returns the head with the same weights for full sequences, as generation needs it. Only layers
    /// whose forward pass communicates with sequence parallelism change: call their
    /// `whole_sequence`. Layers made by [`HeadParts`](super::HeadParts) do not communicate.
    #[must_use]
    fn whole_sequence(self) -> Self {
        self
    }
}

/// A bias of the logits, as in GPT-J and Phi.
impl OutputHead for VocabParallelBias {
    fn logits(&self, x: Tensor<3>, output: &VocabParallelEmbedding) -> Tensor<3> {
        output.logits_with_bias(x, self)
    }
}

/// A family's loss of each token, `[S, B]`, equal on every member of the tensor-parallel group, and
/// 0 where the label is -100. The loss of a batch is its sum, divided by the number of other labels.
pub type TokenLosses = fn(LossInput<'_>) -> Tensor<2>;

/// What a family's own loss is computed from.
#[derive(Debug)]
pub struct LossInput<'a> {
    /// The output of the last norm, `[S, B, H]`; with sequence parallelism `[S / n, B, H]`.
    pub hidden: Tensor<3>,
    /// The logits of this rank's part of the vocabulary, `[S, B, V / n]`, with its padding.
    pub logits: Tensor<3>,
    /// The labels, `[S, B]`; -100 marks the ones to ignore.
    pub labels: Tensor<2, Int>,
    /// The cross-entropy of these logits.
    pub cross_entropy: &'a CrossEntropy,
    /// The tensor-parallel group.
    pub group: &'a Group,
}
