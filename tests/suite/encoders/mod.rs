//! Encoders: BERT on sentences with masked words.

mod corpus;
mod documented;
mod layouts;
mod published;
mod refused;
mod runs;
