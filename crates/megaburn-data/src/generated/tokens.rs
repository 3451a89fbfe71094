use std::ops::Range;

use super::mock::MockTokens;
use crate::synthetic::Synthetic;

/// An endless row of tokens.
#[derive(Debug)]
pub(crate) enum GeneratedTokens {
    Mock(MockTokens),
    Synthetic(Synthetic),
}

impl GeneratedTokens {
    /// The tokens at the positions `range`.
    pub(crate) fn get(&self, range: Range<u64>) -> Vec<u32> {
        match self {
            Self::Mock(mock) => mock.get(range),
            Self::Synthetic(law) => law.tokens_at(range),
        }
    }
}
