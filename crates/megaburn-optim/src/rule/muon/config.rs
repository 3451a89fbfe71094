use burn::{config::Config, tensor::FloatDType};
use megaburn_collective::ProcessGroups;
use megaburn_mesh::ParamSpec;
use serde::{Deserialize, Serialize};

use super::{Muon, NewtonSchulz};
use crate::{
    error::OptimError,
    optimizer::Optimizer,
    rule::{AdamWConfig, Rule, check, check_decay},
    sharding::Sharding,
    state_dtype::check_dtype,
};

/// Muon: orthogonalizes the momentum of each matrix and moves the matrix along the result. AdamW
/// moves all other parameters. The learning rate is an argument of each step; it and the weight
/// decay, which is decoupled, are the same for both.
///
/// A fused matrix counts as several: query, key and value are orthogonalized separately
/// (Megatron-LM's `--muon-split-qkv`), and so are gate and up, which Megatron-LM leaves together.
///
/// Where optimizer state is sharded, the momentum is sharded too. Each matrix has an owner among
/// the ranks that shard it: the owner receives the momentum, orthogonalizes it and sends the result
/// back. An update holds the directions of all matrices of which the rank keeps a part, four bytes
/// per element, and the same amount again while they are sent.
///
/// Source: Jordan et al. 2024, <https://kellerjordan.github.io/posts/muon>; Megatron-LM
/// `megatron/core/optimizer/muon.py`.
#[derive(Config, Debug, PartialEq)]
pub struct MuonConfig {
    /// Decay rate of the mean of gradients.
    #[config(default = 0.95)]
    pub momentum: f64,
    /// Whether to use Nesterov momentum, i.e. to look ahead by the current gradient.
    #[config(default = true)]
    pub nesterov: bool,
    /// Steps of the Newton-Schulz iteration.
    #[config(default = 5)]
    pub num_ns_steps: usize,
    /// The coefficients of the iteration's polynomials.
    #[config(default = "NewtonSchulz::Quintic")]
    pub coefficients: NewtonSchulz,
    /// The type in which the iteration is computed.
    #[config(default = "FloatDType::F32")]
    pub dtype: FloatDType,
    /// How the update of a matrix is scaled by its sizes.
    #[config(default = "MuonScale::Spectral")]
    pub scale: MuonScale,
    /// An additional factor on the update. With `Spectral`, 0.2 moves elements about as far as
    /// AdamW does (Liu et al. 2025, <https://arxiv.org/abs/2502.16982>), which uses the same
    /// learning rate here. Megatron-LM's default is 1.
    #[config(default = 0.2)]
    pub extra_scale: f64,
    /// How ranks that shard a matrix orthogonalize it.
    #[config(default = "MuonTpMode::Duplicated")]
    pub tp_mode: MuonTpMode,
    /// Path prefixes of matrices that AdamW updates.
    #[config(default = r#"["embedding.", "positions.", "head."].map(str::to_string).to_vec()"#)]
    pub excluded: Vec<String>,
    /// Type of the stored mean of gradients. In bf16, a step changes the mean only by more than
    /// 1/512 of itself.
    #[config(default = "FloatDType::F32")]
    pub momentum_buffer: FloatDType,
    /// Updates all parameters that are not matrices. Its `weight_decay` and `main_params` apply to
    /// matrices too.
    #[config(default = "AdamWConfig::new()")]
    pub adamw: AdamWConfig,
}

/// The factor on the update of a matrix of shape `[in, out]`, the layout of Burn's layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MuonScale {
    /// `sqrt(max(in, out))`.
    #[default]
    Spectral,
    /// `sqrt(out / in)`.
    UnitRmsNorm,
    /// `sqrt(max(out / in, 1))`.
    ShapeScaling,
}

impl MuonScale {
    pub(super) fn factor(self, [inputs, outputs]: [usize; 2]) -> f64 {
        let [inputs, outputs] = [inputs as f64, outputs as f64];
        match self {
            Self::Spectral => inputs.max(outputs).sqrt(),
            Self::UnitRmsNorm => (outputs / inputs).sqrt(),
            Self::ShapeScaling => (outputs / inputs).max(1.0).sqrt(),
        }
    }
}

/// How tensor-parallel ranks orthogonalize a matrix that they shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MuonTpMode {
    /// Each rank gathers and orthogonalizes the full matrix. The result is that of a single rank.
    #[default]
    Duplicated,
    /// Each rank works on its shard, and products are summed over ranks. The result is that of a
    /// single rank up to rounding.
    Distributed,
    /// Each rank orthogonalizes its shard as a matrix of its own. Nothing is sent, and the result
    /// depends on the number of ranks.
    Blockwise,
}

impl MuonConfig {
    /// The optimizer before its first step. A rank keeps the part of its state that `sharding`
    /// assigns to it. Of `groups`, it uses those that shard matrices.
    ///
    /// # Errors
    /// The momentum is outside `[0, 1)`, the number of steps does not fit the coefficients, the
    /// scale is not positive, a state type is f16 or f64, or [`AdamWConfig::init`] refuses its
    /// configuration.
    pub fn init(
        &self,
        sharding: &Sharding,
        groups: &ProcessGroups,
    ) -> Result<Optimizer, OptimError> {
        check_decay("momentum", self.momentum)?;
        let steps = self.num_ns_steps;
        let (must_be, ok) = self.coefficients.check_steps(steps);
        check("num_ns_steps", steps as f64, ok, must_be)?;
        let scale = self.extra_scale;
        check(
            "extra_scale",
            scale,
            scale > 0.0 && scale.is_finite(),
            "positive and finite",
        )?;
        check_dtype("momentum_buffer", self.momentum_buffer)?;
        check_dtype("dtype", self.dtype)?;
        self.adamw.validate()?;
        let ProcessGroups { tp, etp, .. } = groups.clone();
        Ok(Optimizer::new(
            Rule::Muon(Muon {
                config: self.clone(),
                tp,
                etp,
            }),
            sharding,
        ))
    }

    /// Whether the parameter is a matrix that Muon orthogonalizes.
    pub(in crate::rule) fn is_orthogonalized(&self, path: &str, spec: &ParamSpec) -> bool {
        let is_excluded = self
            .excluded
            .iter()
            .any(|start| path.starts_with(start.as_str()));
        spec.shard.global_shape.len() == 2 && !is_excluded
    }
}
