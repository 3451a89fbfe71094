//! Where the tokens of a data set are: in memory, in files, or nowhere until they are read.

use std::ops::Range;
use std::sync::Arc;

use crate::{error::DataError, generated::GeneratedTokens, indexed::IndexedDataset};

/// Tokens by position.
#[derive(Debug)]
pub(crate) enum TokenStore {
    /// Tokens in memory, in the narrowest type that holds the vocabulary.
    U8(Vec<u8>),
    U16(Vec<u16>),
    U32(Vec<u32>),
    /// Tokens of all documents of a data set on disk, one after the other. They are read on demand.
    Indexed(Arc<IndexedDataset>),
    /// Tokens without end that are computed when they are read.
    Generated(GeneratedTokens),
}

impl TokenStore {
    /// An empty store in memory.
    pub(crate) fn for_vocab(vocab_size: usize) -> Self {
        match vocab_size {
            0..=0x100 => Self::U8(Vec::new()),
            0x101..=0x1_0000 => Self::U16(Vec::new()),
            _ => Self::U32(Vec::new()),
        }
    }

    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::U8(tokens) => tokens.len() as u64,
            Self::U16(tokens) => tokens.len() as u64,
            Self::U32(tokens) => tokens.len() as u64,
            Self::Indexed(set) => set.num_tokens(),
            Self::Generated(_) => u64::MAX,
        }
    }

    /// Number of bytes of a token.
    pub(crate) fn token_width(&self) -> usize {
        match self {
            Self::U8(_) => 1,
            Self::U16(_) => 2,
            Self::U32(_) | Self::Generated(_) => 4,
            Self::Indexed(set) => set.token_type().size() as usize,
        }
    }

    /// Appends tokens to a store in memory. They must be below the vocabulary size from which the
    /// width was chosen.
    pub(crate) fn extend(&mut self, tokens: &[u32]) {
        match self {
            Self::U8(all) => all.extend(tokens.iter().map(|&token| token as u8)),
            Self::U16(all) => all.extend(tokens.iter().map(|&token| token as u16)),
            Self::U32(all) => all.extend(tokens),
            Self::Indexed(_) | Self::Generated(_) => unreachable!("only tokens in memory grow"),
        }
    }

    /// The tokens at the positions `range`.
    ///
    /// # Errors
    /// The files cannot be read, or hold a token outside the vocabulary.
    pub(crate) fn get(&self, range: Range<u64>, vocab_size: usize) -> Result<Vec<u32>, DataError> {
        let at = range.start as usize..range.end as usize;
        Ok(match self {
            Self::U8(tokens) => tokens[at].iter().map(|&token| token.into()).collect(),
            Self::U16(tokens) => tokens[at].iter().map(|&token| token.into()).collect(),
            Self::U32(tokens) => tokens[at].to_vec(),
            Self::Indexed(set) => set.tokens_at(range, vocab_size)?,
            Self::Generated(tokens) => tokens.get(range),
        })
    }
}
