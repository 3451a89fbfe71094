//! Tools of Burn on shards: LoRA, quantisation, and models of Burn's layers that a plan splits.

mod adapters;
mod attention;
mod dropout;
mod parallelize;
mod plans;
