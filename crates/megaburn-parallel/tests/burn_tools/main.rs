//! Tools of Burn on shards: LoRA, quantisation, and models of Burn's layers that a plan splits.

mod adapters;
mod attention;
mod bf16;
mod display;
mod dropout;
mod multi_query;
mod parallelize;
mod plans;
