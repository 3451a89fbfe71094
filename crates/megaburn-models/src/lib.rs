//! Models that read like their papers. Their layers own the collectives, so a `forward` contains no
//! communication, and one implementation serves every layout.
//!
//! All families ([`Family::BUILT_IN`]) are one [`Decoder`], whose block is composed of the parts that its
//! [`DecoderConfig`] names. The parts of a family and its names on Hugging Face are defined in one
//! file of [`families`].

// Errors are values; the panics that remain are documented.
#![deny(clippy::unwrap_used, clippy::panic)]

pub mod activation_memory;
pub mod assets;
pub mod convert;
pub mod decoder;
mod error;
pub mod families;
pub mod flops;
pub mod generate;
pub mod hf;
mod quantize;
pub mod source;
pub mod upcycle;
mod warn_once;
pub mod weights;

pub use decoder::{Decoder, DecoderConfig};
pub use error::ModelError;
pub use families::Family;
