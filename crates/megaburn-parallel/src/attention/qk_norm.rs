use burn::{config::Config, prelude::Device, tensor::Tensor};
use megaburn_collective::Group;
use megaburn_kernels::rms_norm;
use megaburn_mesh::FusedPart;

use crate::{
    error::ParallelError,
    norm::{Norm, NormConfig},
};

/// RMS norms of queries and keys before the rotation, which keep the scores bounded.
///
/// Source: Henry et al., "Query-key normalization for transformers" (2020).
#[derive(Config, Debug, PartialEq)]
pub struct QkNorm {
    /// What is normalized together.
    #[config(default = "QkNormKind::Head")]
    pub kind: QkNormKind,
    /// Added under the square root.
    #[config(default = 1e-5)]
    pub epsilon: f64,
    /// Whether the results are scaled by `1 + gamma`, with gamma starting at zero (Gemma 3).
    #[config(default = false)]
    pub zero_centered_gamma: bool,
}

/// What a [`QkNorm`] normalizes together.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum QkNormKind {
    /// The features of each head; all heads share a scale for each feature (Qwen3, Gemma 3;
    /// Megatron's `--qk-layernorm`).
    Head,
    /// The features of all heads, each with a scale of its own (OLMo 2, OLMoE). Over several
    /// tensor-parallel ranks, it is composed of tensor operations and sums over the ranks.
    Width,
    /// The features of each head, without a scale (Llama 4; Megatron's `--qk-l2-norm`).
    L2,
}

impl QkNorm {
    /// The norm of `heads`; `None` if it has no scale.
    pub(super) fn init(
        &self,
        heads: FusedPart,
        name: &str,
        group: &Group,
        device: &Device,
    ) -> Result<Option<Norm>, ParallelError> {
        let of = |width| NormConfig {
            epsilon: self.epsilon,
            zero_centered_gamma: self.zero_centered_gamma,
            // Each rank normalizes its own heads, so the gradient of the scale is a sum over ranks.
            sequence_parallel: true,
            ..NormConfig::rms(width)
        };
        Ok(match self.kind {
            QkNormKind::Head => Some(of(heads.unit).init(group, device)),
            QkNormKind::Width => Some(of(heads.size()).init_split(heads, name, group, device)?),
            QkNormKind::L2 => None,
        })
    }

    pub(super) fn is_by_width(&self) -> bool {
        self.kind == QkNormKind::Width
    }

    /// The epsilon of norms without a scale.
    pub(super) fn l2_epsilon(&self) -> Option<f64> {
        (self.kind == QkNormKind::L2).then_some(self.epsilon)
    }
}

/// The norm of each head, without a scale.
///
/// # Shapes
/// `[seq, batch, heads, head_dim]`, unchanged
pub(super) fn l2_normed(x: Tensor<4>, epsilon: f64) -> Tensor<4> {
    let ones = Tensor::ones([x.dims()[3]], (&x.device(), x.dtype()));
    rms_norm(x, ones, epsilon)
}
