//! Data that is computed when it is read: without files, in any amount.

mod mock;
mod source;
#[cfg(test)]
mod tests;
mod tokens;

pub use source::{GeneratedPart, GeneratedSource};
pub(crate) use tokens::GeneratedTokens;
