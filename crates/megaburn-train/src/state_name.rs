//! How errors name the tensors that a rank holds.

use std::fmt;

use megaburn_optim::Moment;
use serde::{Deserialize, Serialize};

/// What a tensor is to its parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StateKind {
    /// The parameter itself.
    Weight,
    /// Its f32 master.
    Master,
    /// The decaying mean of its gradients.
    ExpAvg,
    /// The decaying mean of its squared gradients.
    ExpAvgSq,
    /// The momentum of its gradients.
    MomentumBuffer,
    /// Its gradient, summed over ranks.
    Gradient,
}

impl From<Moment> for StateKind {
    fn from(moment: Moment) -> Self {
        match moment {
            Moment::ExpAvg => Self::ExpAvg,
            Moment::ExpAvgSq => Self::ExpAvgSq,
            Moment::MomentumBuffer => Self::MomentumBuffer,
        }
    }
}

impl fmt::Display for StateKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Weight => "weight",
            Self::Master => "master",
            Self::ExpAvg => "exp_avg",
            Self::ExpAvgSq => "exp_avg_sq",
            Self::MomentumBuffer => "momentum_buffer",
            Self::Gradient => "gradient",
        })
    }
}

/// A tensor of a run, which errors name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateName {
    /// What the tensor is to its parameter.
    pub kind: StateKind,
    /// The path of the parameter.
    pub param: String,
}

impl fmt::Display for StateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the {} of `{}`", self.kind, self.param)
    }
}
