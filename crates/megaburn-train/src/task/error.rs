//! Why a task cannot be trained.

use std::error::Error;

use thiserror::Error;

/// An error of a task: of its model, or of its data.
pub type TaskError = Box<dyn Error + Send + Sync>;

/// Why a run of a task cannot start or continue.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the error message of each variant describes its fields"
)]
pub enum TaskRunError {
    #[error("unknown key `{key}` in {origin}; {}", match nearest {
        Some(nearest) => format!("the nearest key is `{nearest}`"),
        None => "neither the task nor a run has a similar key".into(),
    })]
    UnknownKey {
        key: String,
        origin: String,
        nearest: Option<String>,
    },
    #[error("the task cannot {what}: {why}")]
    Cannot { what: &'static str, why: String },
}

impl TaskRunError {
    /// That the task cannot do `what`, such as "open its data".
    pub(crate) fn cannot(what: &'static str, why: impl ToString) -> Self {
        Self::Cannot {
            what,
            why: why.to_string(),
        }
    }
}
