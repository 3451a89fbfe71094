//! Guarantees of checkpoints: resharding, refusal of damage, failures while saving, kill -9.

mod async_save;
mod compare;
mod corruption;
mod errors;
mod experts;
mod export;
mod failures;
mod hf_errors;
mod hf_read;
mod kill;
mod lazy;
mod model;
mod published;
mod reshape;
mod retention;
mod shares;
mod single;
mod used_bytes;
