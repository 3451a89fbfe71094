use std::sync::Arc;

use megaburn_kernels::RopeTable;

use crate::{ContextParallel, PackedDocuments};

/// Which tokens of the run a forward pass sees, so that dropout does not depend on the layout.
#[derive(derive_new::new, Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenBlock {
    /// Number of the training step.
    pub step: u64,
    /// Samples of the global batch.
    pub global_batch: usize,
    /// Number of this micro-batch's first sample within the global batch.
    pub first_sample: usize,
}

/// What layers know of the tokens whose stream they get.
#[derive(Clone, Debug, Default)]
pub struct TokenContext {
    /// The rotations of their positions; none where the model has learned positions.
    pub rope: Option<RopeTable>,
    /// In training: what the losses of their labels are multiplied with, and so must be every other loss; none:
    /// nobody is trained.
    pub loss_factor: Option<f64>,
    /// Which of them are asked for something, `[seq, batch]` of the ranks of a tensor-parallel group together; none:
    /// all. The others are padding, of which experts get nothing.
    pub counted: Option<Arc<[bool]>>,
    /// In training: which of the run they are.
    pub block: Option<TokenBlock>,
    /// Documents that do not see each other; none: each row is one.
    pub documents: Option<PackedDocuments>,
    /// The ranks that share these sequences; none: those that the layer was told of.
    pub parallel: Option<ContextParallel>,
}

impl TokenContext {
    /// Whole rows of tokens that nobody is trained on.
    pub fn new(rope: Option<RopeTable>) -> Self {
        Self {
            rope,
            ..Self::default()
        }
    }
}
