//! Gradients, clipping, AdamW and schedules for sharded parameters.
