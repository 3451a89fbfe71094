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

/// The parts of NVFP4 that can be left out; by default none is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Nvfp4 {
    /// Whether gradients are rounded [stochastically](SmallFloat::round_stochastically).
    pub stochastic_rounding: bool,
    /// Whether input and gradient are multiplied by a random Hadamard matrix, 16 tokens at a time,
    /// before they are quantised for the gradient of the weight.
    pub random_hadamard: bool,
    /// Whether the elements of a weight share scales in blocks of 16 by 16, so that both passes
    /// compute with the same numbers.
    pub two_dimensional_weights: bool,
}

impl Default for Nvfp4 {
    fn default() -> Self {
        Self {
            stochastic_rounding: true,
            random_hadamard: true,
            two_dimensional_weights: true,
        }
    }
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
    /// 16 neighbours along the dimension that a product sums over share a scale in E4M3, and all
    /// elements another one in f32. The format is [E2M1](SmallFloat::E2m1). Source: NVIDIA,
    /// "Pretraining Large Language Models with NVFP4" (2025); Transformer Engine,
    /// `NVFP4BlockScaling`.
    Nvfp4(Nvfp4),
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

/// The neighbours that share a scale in NVFP4, and the tokens of a Hadamard transform.
pub(super) const NVFP4_BLOCK: usize = 16;

impl QuantizationRecipe {
    /// NVFP4, with all or some of its parts.
    pub fn nvfp4(parts: Nvfp4) -> Self {
        Self {
            scaling: Scaling::Nvfp4(parts),
            forward: SmallFloat::E2m1,
            gradients: SmallFloat::E2m1,
            power_of_two_scales: false,
        }
    }

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
            Scaling::Nvfp4(_) => Some(NVFP4_BLOCK),
        }
    }

    /// Whether the scale depends on the largest magnitude of the whole matrix.
    pub fn needs_amax(&self) -> bool {
        matches!(self.scaling, Scaling::Tensor | Scaling::Nvfp4(_))
    }

    /// Whether a matrix is transformed before it is quantised for a product that sums over a
    /// dimension: input and gradient, along the tokens, by NVFP4's random Hadamard transform.
    pub fn transforms(&self, role: MatrixRole, summed: SummedDim) -> bool {
        let is_on = matches!(self.scaling, Scaling::Nvfp4(parts) if parts.random_hadamard);
        is_on && role != MatrixRole::Weight && summed == SummedDim::Rows
    }

    /// Whether a matrix is rounded stochastically.
    pub fn rounds_stochastically(&self, role: MatrixRole) -> bool {
        let is_on = matches!(self.scaling, Scaling::Nvfp4(parts) if parts.stochastic_rounding);
        is_on && role == MatrixRole::Gradient
    }

    /// The numbers of rows and columns that share a scale, of a product that sums over a dimension.
    /// The last block of a dimension may be smaller.
    pub fn block(&self, role: MatrixRole, summed: SummedDim) -> [usize; 2] {
        let Some(len) = self.block_len() else {
            return [usize::MAX; 2];
        };
        let is_square = match self.scaling {
            Scaling::Blocks => true,
            Scaling::Nvfp4(parts) => parts.two_dimensional_weights,
            Scaling::Tensor | Scaling::Microscaling => false,
        };
        match summed {
            _ if is_square && role == MatrixRole::Weight => [len; 2],
            SummedDim::Rows => [len, 1],
            SummedDim::Cols => [1, len],
        }
    }
}
