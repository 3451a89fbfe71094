//! LoRA and quantisation of weights that are shards.

mod adapter;
mod lora;
mod quantizer;
mod weight_value;

pub use adapter::ShardedAdapter;
pub use lora::ShardedLora;
pub use quantizer::ShardedQuantizer;
pub(crate) use weight_value::{is_adapted, weight_value, weight_value_as};
