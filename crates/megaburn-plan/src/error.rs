use megaburn_pipeline::PipelineError;
use megaburn_train::{Exit, TrainError};
use thiserror::Error;

/// Why a run cannot be planned.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the error message of each variant describes its fields"
)]
pub enum PlanError {
    #[error("`--gpu {name}` is not known: choose one of {known}")]
    UnknownGpu { name: String, known: String },
    #[error(
        "`precision.recipe` is {recipe}, but {gpu} has no units for products in FP8: choose another \
        --gpu, or set precision.recipe to \"bf16\""
    )]
    NoFp8 { recipe: String, gpu: &'static str },
    #[error("`--gpus` is 0: a run needs one GPU at least")]
    NoGpus,
    #[error(
        "rank {} and rank {} do not agree in call {number} of the group `{group}`: {} and {}. This is a \
        bug of megaburn: please report it with the configuration",
        ranks[0], ranks[1], calls[0], calls[1]
    )]
    Walk {
        group: String,
        number: usize,
        ranks: [usize; 2],
        calls: Box<[String; 2]>,
    },
    #[error(transparent)]
    Train(#[from] TrainError),
}

impl From<PipelineError> for PlanError {
    fn from(error: PipelineError) -> Self {
        Self::Train(error.into())
    }
}

impl PlanError {
    /// The exit code of a program that ends with this error.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Train(error) => error.exit(),
            Self::Walk { .. } => Exit::Failed,
            Self::UnknownGpu { .. } | Self::NoFp8 { .. } | Self::NoGpus => Exit::BadInput,
        }
    }
}
