//! Optimizers, ZeRO, offloading and schedules.

pub(crate) mod offload;
pub(crate) mod optimizers;
pub(crate) mod schedules;
pub(crate) mod zero;
mod width;
