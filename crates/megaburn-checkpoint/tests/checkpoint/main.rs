//! What checkpoints promise: reshaping, refusal of damage, failures while saving, kill -9.

mod corruption;
mod errors;
mod failures;
mod kill;
mod model;
mod reshape;
