use thiserror::Error;

/// Why bytes cannot be read as a pickle.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("at byte {at}, {why}")]
pub struct PickleError {
    at: usize,
    why: String,
    is_truncated: bool,
}

impl PickleError {
    pub(super) fn new(at: usize, why: impl Into<String>) -> Self {
        Self {
            at,
            why: why.into(),
            is_truncated: false,
        }
    }

    /// The pickle goes further than its bytes.
    pub(super) fn truncated(len: usize) -> Self {
        Self {
            is_truncated: true,
            ..Self::new(len, "the pickle is cut off")
        }
    }

    /// The byte at which it was found.
    pub fn at(&self) -> usize {
        self.at
    }

    /// Whether the bytes ended before the pickle did.
    pub fn is_truncated(&self) -> bool {
        self.is_truncated
    }
}
