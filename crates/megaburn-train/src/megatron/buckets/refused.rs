use std::path::Path;

use crate::megatron::error::MegatronError;

/// What a person can do if the buckets cannot be read.
pub(super) const FIX: &str = "save the run from Megatron-LM with --dist-ckpt-optim-fully-reshardable, or \
    import it with --weights-only";

/// Refuses the buckets of a checkpoint.
pub(super) fn refused(path: &Path, why: impl Into<String>) -> MegatronError {
    MegatronError::Buckets {
        path: path.into(),
        why: why.into(),
        fix: FIX,
    }
}
