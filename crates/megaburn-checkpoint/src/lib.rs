//! Sharded, atomic, reshardable checkpoints.
