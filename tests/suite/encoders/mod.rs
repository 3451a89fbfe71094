//! Encoders: BERT on sentences with masked words.

pub(crate) mod corpus;
mod documented;
mod layouts;
mod losses;
mod published;
mod refused;
mod runs;
