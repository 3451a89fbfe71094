use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The samples at which an update takes its learning rate and its weight decay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(JsonSchema)]
pub enum ScheduleAt {
    /// The samples before those of the update, as in Megatron-LM: the first update has `init_lr`.
    Start,
    /// The samples of the update included, so that the first one already moves the weights.
    #[default]
    End,
}
