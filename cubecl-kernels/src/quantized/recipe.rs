use serde::{Deserialize, Serialize};

use super::format::SmallFloat;

/// How the matrices of a linear layer's three products are quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct QuantizationRecipe {
    /// What shares a scale.
    pub scaling: Scaling,
    /// The format of inputs and weights.
    pub forward: SmallFloat,
    /// The format of the result's gradients.
    pub gradients: SmallFloat,
    /// Whether scales are rounded down to powers of two.
    pub power_of_two_scales: bool,
}

/// Which elements of a matrix share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Scaling {
    /// All elements. Source: Transformer Engine, `Float8CurrentScaling` and `DelayedScaling`.
    Tensor,
    /// 128 neighbours along the dimension that a product sums over; blocks of 128 by 128 in
    /// weights. Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 3.3.2.
    Blocks,
    /// 32 neighbours along the dimension that a product sums over; scales are powers of two
    /// (E8M0), rounded up. Source: OCP Microscaling Formats (MX) 1.0 (2023); Mishra et al.,
    /// "Recipes for Pre-training LLMs with MXFP8" (2025).
    Microscaling,
}

/// The place of a matrix in a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MatrixRole {
    /// The layer's input, `[t, in]`.
    Input,
    /// The weight, `[in, out]`.
    Weight,
    /// The gradient of the result, `[t, out]`.
    Gradient,
}

/// A dimension of a matrix: that which a product sums over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SummedDim {
    /// The first dimension.
    Rows,
    /// The second dimension.
    Cols,
}

impl QuantizationRecipe {
    /// The format of a matrix.
    pub fn format(&self, role: MatrixRole) -> SmallFloat {
        match role {
            MatrixRole::Input | MatrixRole::Weight => self.forward,
            MatrixRole::Gradient => self.gradients,
        }
    }

    /// The number of neighbours that share a scale; `None` if all elements do.
    pub fn block_len(&self) -> Option<usize> {
        match self.scaling {
            Scaling::Tensor => None,
            Scaling::Blocks => Some(128),
            Scaling::Microscaling => Some(32),
        }
    }

    /// Whether the scale depends on the largest magnitude of the whole matrix.
    pub fn needs_amax(&self) -> bool {
        self.scaling == Scaling::Tensor
    }

    /// The numbers of rows and columns that share a scale, of a product that sums over a dimension.
    /// The last block of a dimension may be smaller.
    pub fn block(&self, role: MatrixRole, summed: SummedDim) -> [usize; 2] {
        let Some(len) = self.block_len() else {
            return [usize::MAX; 2];
        };
        match summed {
            _ if (self.scaling, role) == (Scaling::Blocks, MatrixRole::Weight) => [len; 2],
            SummedDim::Rows => [len, 1],
            SummedDim::Cols => [1, len],
        }
    }
}
