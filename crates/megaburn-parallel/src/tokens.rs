use std::sync::Arc;

use megaburn_kernels::RopeTable;

use crate::{ContextParallel, PackedDocuments};

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

/// What layers know about the tokens of the residual stream.
#[derive(Clone, Debug, Default)]
pub struct TokenContext {
    /// The rotations of their positions; `None` where the model has learned positions.
    pub rope: Option<RopeTable>,
    /// In training, the factor on the losses of their labels, which every other loss must use too;
    /// `None` outside of training.
    pub loss_factor: Option<f64>,
    /// Which tokens are not padding, as `[seq, batch]` of the full tensor-parallel group; `None`
    /// means all. Padding is not sent to experts.
    pub counted: Option<Arc<[bool]>>,
    /// In training, which tokens of the run they are.
    pub block: Option<TokenBlock>,
    /// Packed documents, which do not attend to each other; `None` means one document per row.
    pub documents: Option<PackedDocuments>,
    /// The ranks that share these sequences; `None` means those that the layer was built with.
    pub parallel: Option<ContextParallel>,
}

impl TokenContext {
    /// A context for full, unpadded rows outside of training.
    pub fn new(rope: Option<RopeTable>) -> Self {
        Self {
            rope,
            ..Self::default()
        }
    }
}
