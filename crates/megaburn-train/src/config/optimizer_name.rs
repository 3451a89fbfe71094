//! The names of the optimizers.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The optimizer that updates parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(JsonSchema)]
pub enum OptimizerName {
    /// AdamW.
    #[default]
    AdamW,
    /// Gradient descent with momentum. Its weight decay is added to the gradient.
    Sgd,
    /// Lion.
    Lion,
    /// Muon for matrices; AdamW for the embedding, the output matrix and everything else.
    Muon,
}

impl OptimizerName {
    /// Whether the optimizer keeps AdamW's moments, at least for some parameters.
    pub(super) fn has_adamw(self) -> bool {
        matches!(self, Self::AdamW | Self::Muon)
    }
}

impl fmt::Display for OptimizerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AdamW => "adamw",
            Self::Sgd => "sgd",
            Self::Lion => "lion",
            Self::Muon => "muon",
        })
    }
}
