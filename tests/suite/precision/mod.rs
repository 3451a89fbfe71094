//! Training in bf16 and f16.

pub(crate) mod bf16;
pub(crate) mod bf16_models;
pub(crate) mod bf16_state;
pub(crate) mod f16;
