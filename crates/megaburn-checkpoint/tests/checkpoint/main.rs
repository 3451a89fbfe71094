//! Guarantees of checkpoints: resharding, refusal of damage, failures while saving, kill -9.

mod async_save;
mod average;
mod compare;
mod corruption;
mod errors;
mod examine;
mod experts;
mod export;
mod failures;
mod hf_errors;
mod hf_read;
mod hosts;
mod inventory;
mod kill;
mod lazy;
mod model;
mod prune;
mod published;
mod reshape;
mod retention;
mod shares;
mod single;
mod statistics;
mod torch_weights;
mod used_bytes;
