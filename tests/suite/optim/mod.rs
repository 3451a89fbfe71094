//! Optimizers, ZeRO, offloading and schedules.

pub(crate) mod offload;
pub(crate) mod optimizers;
pub(crate) mod qk_clip;
pub(crate) mod schedules;
mod width;
pub(crate) mod zero;
