//! What the model reads in a forward pass.

use std::sync::Arc;

use burn::{prelude::Int, tensor::Tensor};
use megaburn_models::{decoder::MtpTargets, flops::FlopShape};
use megaburn_parallel::{ContextParallel, EncoderRows, PackedDocuments};

/// The inputs and labels of a micro-batch.
pub(super) struct Batch {
    /// `[seq_len / n, samples]` on each of `n` context-parallel ranks.
    pub(super) tokens: Tensor<2, Int>,
    /// The next token at each position, of the same shape; of an encoder-decoder model those of the
    /// decoder's positions, which are the last ones.
    pub(super) labels: Tensor<2, Int>,
    /// Number of these labels that count in the loss.
    pub(super) counted: usize,
    /// The loss mask; `None` if all labels count.
    pub(super) loss_mask_values: Option<Arc<[bool]>>,
    /// The inputs and labels of each multi-token-prediction depth.
    pub(super) ahead: Vec<MtpTargets>,
    /// Lengths of the documents of rows that count, without padding; of an encoder-decoder model the
    /// lengths of each such row: the encoder's and the decoder's.
    pub(super) lens: Vec<usize>,
    /// The positions of the encoder, of an encoder-decoder model.
    pub(super) encoder: Option<EncoderRows>,
    /// Number of ranks that share the documents.
    pub(super) ranks: usize,
    pub(super) documents: Option<PackedDocuments>,
    /// The token types of each row, for an encoder.
    pub(super) token_types: Option<Arc<[Vec<usize>]>>,
    /// The labels of the binary head, `[1, samples]`, and how many of them count.
    pub(super) sentence_order: Option<Tensor<2, Int>>,
    pub(super) counted_rows: usize,
    /// The ranks that share these sequences, with hybrid context parallelism, where they differ
    /// between passes.
    pub(super) parallel: Option<ContextParallel>,
}

impl Batch {
    /// FLOPs of forward and backward over all sequences, by Megatron-LM's formula, divided by the
    /// number of ranks that share them.
    pub(super) fn flops(&self, shape: &FlopShape) -> f64 {
        let of_all: f64 = match &self.encoder {
            Some(_) => {
                let pairs = self.lens.as_chunks::<2>().0.iter();
                pairs
                    .map(|[encoder, decoder]| shape.training_pairs(1, [*encoder, *decoder]))
                    .sum()
            }
            None => self.lens.iter().map(|len| shape.training(1, *len)).sum(),
        };
        of_all / self.ranks as f64
    }
}
