//! Llama 2 and 3: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.
//!
//! Source: Touvron et al. (2023); Grattafiori et al., "The Llama 3 herd of models" (2024).

mod config;
mod hf;
mod model;

pub use config::LlamaConfig;
pub use model::{Block, Llama};
