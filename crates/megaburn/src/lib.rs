//! Megatron-LM's training system for Burn: tensor, sequence and data parallelism as ordinary modules.
