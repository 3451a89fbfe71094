use std::path::PathBuf;

use megaburn_torch::TorchError;
use thiserror::Error;

/// Why a run cannot be moved from or to Megatron-LM.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the error message of each variant describes its fields"
)]
pub enum MegatronError {
    #[error(transparent)]
    Torch(#[from] TorchError),
    #[error("`{}` has no {what}: {why}", path.display())]
    Missing {
        path: PathBuf,
        what: String,
        why: String,
    },
    #[error(
        "the number of steps in `{}` is unknown: it has neither `train_iters`, nor `train_samples` \
        without a batch ramp",
        path.display()
    )]
    NoSteps { path: PathBuf },
    #[error("the argument `{name}` in `{}` is {value}: {why}", path.display())]
    Argument {
        path: PathBuf,
        name: String,
        value: String,
        why: String,
    },
    #[error("the tensor `{name}` in `{}` {why}", path.display())]
    Tensor {
        path: PathBuf,
        name: String,
        why: String,
    },
    #[error("the buckets of the optimizer in `{}` {why}; {fix}", path.display())]
    Buckets {
        path: PathBuf,
        why: String,
        fix: &'static str,
    },
    #[error("`{}` cannot be written for Megatron-LM: {why}", path.display())]
    NotExpressible { path: PathBuf, why: String },
}
