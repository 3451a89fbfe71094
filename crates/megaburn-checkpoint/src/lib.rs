//! Sharded, atomic, reshardable checkpoints.
/// x
#[derive(Debug, thiserror::Error)]
#[error("x")]
pub struct CheckpointError;
