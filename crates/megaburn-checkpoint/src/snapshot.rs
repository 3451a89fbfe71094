use serde_json::Value;

/// The contents of a checkpoint other than tensors. Rank 0's snapshot is written.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// The run that writes the checkpoint; stored in the manifest.
    pub run_id: Option<String>,
    /// Updates done.
    pub step: u64,
    /// The model's configuration.
    pub model: Value,
    /// Other state that the trainer needs to resume exactly.
    pub trainer: Value,
}
