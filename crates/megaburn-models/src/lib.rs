//! Models that read like their papers. Their layers own the collectives, so a `forward` contains no
//! communication, and one implementation serves every layout.

mod error;
pub mod flops;
pub mod hf;
pub mod llama;

pub use error::ModelError;
pub use llama::{Llama, LlamaConfig};
