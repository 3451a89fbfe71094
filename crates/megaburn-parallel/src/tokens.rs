use std::sync::Arc;

use burn::{prelude::Int, tensor::Tensor};

use crate::{
    block_observer::BlockObserver,
    block_statistics::BlockStatistics,
    context::{ContextParallel, PackedDocuments},
    encoder_rows::EncoderRows,
    selective_save::SelectiveSave,
};

/// Which tokens of the run a forward pass sees. It keys dropout, so that the masks do not depend on
/// the layout.
#[derive(derive_new::new, Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenBlock {
    /// Index of the training step.
    pub step: u64,
    /// Samples in the global batch.
    pub global_batch: usize,
    /// Index of this micro-batch's first sample within the global batch.
    pub first_sample: usize,
}

/// What a forward pass knows about its micro-batch, besides the tokens. The default is for full,
/// unpadded rows outside of training.
#[derive(Clone, Debug, Default)]
pub struct BatchContext {
    /// In training, the factor with which losses are multiplied before backward. Losses that layers
    /// add are multiplied by it too. `None` outside of training.
    pub loss_factor: Option<f64>,
    /// Which tokens are not padding, as `[seq, batch]` of the full tensor-parallel group; `None`
    /// means all. Padding is not sent to experts.
    pub counted: Option<Arc<[bool]>>,
    /// The number of tokens of a full row without padding; `None` means all. Rotary scalings may
    /// depend on it.
    pub seq_len: Option<usize>,
    /// In training, which tokens of the run they are. This enables dropout.
    pub block: Option<TokenBlock>,
    /// Packed documents, which do not attend to each other; `None` means one document per row.
    pub documents: Option<PackedDocuments>,
    /// The token types of each row, by position, for a model that has them; `None` means type 0 for
    /// all.
    pub token_types: Option<Arc<[Vec<usize>]>>,
    /// The positions of the encoder, in an encoder-decoder model; `None` in other models.
    pub encoder: Option<EncoderRows>,
    /// For each row, whether its two segments are in the wrong order, `[1, batch]` of 0 and 1; the
    /// labels of a binary head. `None` means that its loss is not computed.
    pub sentence_order: Option<Tensor<2, Int>>,
    /// The ranks that share these sequences; `None` means those that the layer was built with.
    pub parallel: Option<ContextParallel>,
    /// In a recomputed region, the outputs of attention that it saves; `None` saves none.
    pub saved_attention: Option<SelectiveSave>,
    /// Keeps what each block computes; `None` keeps nothing.
    pub observer: Option<BlockObserver>,
    /// Sums over what each block computes; `None` counts nothing.
    pub statistics: Option<BlockStatistics>,
}
