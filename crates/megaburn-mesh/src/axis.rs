use std::fmt;

use serde::{Deserialize, Serialize};

/// One dimension of the mesh of ranks.
///
/// Attention and dense layers use the grid `tp, cp, dp, pp`; experts use `etp, ep, edp, pp` over
/// the same ranks. Only `pp` belongs to both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    /// Tensor parallelism: the matrices of a layer are split.
    Tp,
    /// Context parallelism: each sequence is split.
    Cp,
    /// Data parallelism: the batch is split.
    Dp,
    /// Pipeline parallelism: the layers are split.
    Pp,
    /// Expert parallelism: the experts are split.
    Ep,
    /// Tensor parallelism inside an expert.
    Etp,
    /// Data parallelism among the ranks that hold copies of the same experts.
    Edp,
}

impl Axis {
    /// The dense grid, fastest to slowest.
    pub const DENSE: [Axis; 4] = [Axis::Tp, Axis::Cp, Axis::Dp, Axis::Pp];
    /// The expert grid over the same ranks, fastest to slowest.
    pub const EXPERT: [Axis; 4] = [Axis::Etp, Axis::Ep, Axis::Edp, Axis::Pp];

    /// The name used in layout texts, messages and files.
    pub fn name(self) -> &'static str {
        match self {
            Axis::Tp => "tp",
            Axis::Cp => "cp",
            Axis::Dp => "dp",
            Axis::Pp => "pp",
            Axis::Ep => "ep",
            Axis::Etp => "etp",
            Axis::Edp => "edp",
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
