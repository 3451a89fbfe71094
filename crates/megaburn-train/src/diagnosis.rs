//! What is known about the origin of a step that is not finite.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What recomputing a non-finite step found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Diagnosis {
    /// The step was not recomputed.
    #[default]
    None,
    /// Every rank's gradients are finite this time.
    Finite,
    /// The ranks and the parameter where they are not finite.
    NonFiniteOrigin(NonFiniteOrigin),
    /// Recomputing failed, for instance because there is not enough memory.
    Failed(String),
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => Ok(()),
            Self::Finite => f.write_str(
                ", but each rank's gradients are finite when recomputed: their sum overflows, or \
                the hardware failed once",
            ),
            Self::NonFiniteOrigin(non_finite_origin) => write!(f, ", {non_finite_origin}"),
            Self::Failed(why) => {
                write!(
                    f,
                    ", and it could not be recomputed to find the origin: {why}"
                )
            }
        }
    }
}

/// Where the gradients of a step are not finite.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NonFiniteOrigin {
    /// The ranks of the world whose own gradients are not finite. There are several if ranks
    /// compute with what one of them sends.
    pub ranks: Vec<usize>,
    /// The first non-finite parameter in the order of the backward pass, in the last pipeline stage
    /// that has one, on the lowest of these ranks.
    pub param: String,
}

impl fmt::Display for NonFiniteOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ranks, param } = self;
        let plural = if ranks.len() == 1 { "" } else { "s" };
        let ranks = ranks
            .iter()
            .map(usize::to_string)
            .collect::<Vec<_>>()
            .join(", ");
        write!(
            f,
            "first in the backward pass in `{param}`, on rank{plural} {ranks}"
        )
    }
}
