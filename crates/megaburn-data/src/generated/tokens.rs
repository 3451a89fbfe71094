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

    /// The positions after position `start` at which documents end, in order. Synthetic symbols are
    /// one document.
    pub(crate) fn document_ends_after(&self, start: u64) -> Box<dyn Iterator<Item = u64> + '_> {
        match self {
            Self::Mock(mock) => Box::new(mock.document_ends_after(start)),
            Self::Synthetic(_) => Box::new(std::iter::once(u64::MAX)),
        }
    }
}
