//! LoRA and quantisation of weights that are shards.

mod lora;
mod quantizer;
mod weight_value;

pub use lora::{ShardedAdapter, ShardedLora};
pub use quantizer::ShardedQuantizer;
pub(crate) use weight_value::{is_adapted, weight_value};
