use burn::tensor::FloatDType;
use megaburn_collective::ProcessGroups;
use megaburn_mesh::ParamSpec;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Muon, NewtonSchulz};
use crate::{
    dtype::Dtype,
    error::OptimError,
    optimizer::Optimizer,
    rule::{AdamWConfig, Rule, check, check_decay},
    sharding::Sharding,
    state_dtype::{StateDtype, check_dtype},
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
/// In a configuration file this is the section `[optimizer.muon]`, without the fields that all
/// optimizers share.
///
/// Source: Jordan et al. 2024, <https://kellerjordan.github.io/posts/muon>; Megatron-LM
/// `megatron/core/optimizer/muon.py`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct MuonConfig {
    /// Decay of the momentum, from 0 to below 1.
    #[schemars(extend("minimum" = 0, "exclusiveMaximum" = 1))]
    pub momentum: f64,
    /// Whether to use Nesterov momentum.
    pub nesterov: bool,
    /// Number of Newton-Schulz steps that orthogonalize a matrix.
    pub num_ns_steps: usize,
    /// Coefficients of the Newton-Schulz polynomials: `simple`, `quintic` (made for five steps) or
    /// `polar_express` (made for eight).
    pub coefficients: NewtonSchulz,
    /// Element type of the Newton-Schulz iteration: `f32` or `bf16`. Default: `bf16` if
    /// `train.dtype` is `bf16`, else `f32`.
    #[schemars(extend("x-refused" = ["f16", "float16"], "x-rule" = "f32 or bf16"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dtype: Option<Dtype>,
    /// Factor on the update of an `[in, out]` matrix: the square root of its larger size
    /// (`spectral`), of `out / in` (`unit_rms_norm`) or of `max(1, out / in)` (`shape_scaling`).
    #[serde(rename = "scale_mode")]
    pub scale: MuonScale,
    /// Further factor on the update. 0.2 with `spectral` moves elements about as far as AdamW does.
    // Liu et al. 2025, <https://arxiv.org/abs/2502.16982>. Megatron-LM's default is 1.
    #[serde(rename = "extra_scale_factor")]
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub extra_scale: f64,
    /// How tensor-parallel ranks orthogonalize a matrix: `duplicated`, every rank all of it;
    /// `distributed`, together; `blockwise`, each rank its own shard, which makes the optimizer
    /// depend on `parallel.tp`.
    pub tp_mode: MuonTpMode,
    /// Path prefixes of matrices that AdamW updates.
    #[serde(skip)]
    pub excluded: Vec<String>,
    /// Type of the stored mean of gradients. In bf16, a step changes the mean only by more than
    /// 1/512 of itself.
    #[serde(skip)]
    pub momentum_buffer: StateDtype,
    /// Updates all parameters that are not matrices. Its `weight_decay` and `main_params` apply to
    /// matrices too.
    #[serde(skip)]
    pub adamw: AdamWConfig,
}

impl Default for MuonConfig {
    fn default() -> Self {
        Self {
            momentum: 0.95,
            nesterov: true,
            num_ns_steps: 5,
            coefficients: NewtonSchulz::Quintic,
            dtype: None,
            scale: MuonScale::Spectral,
            extra_scale: 0.2,
            tp_mode: MuonTpMode::Duplicated,
            excluded: [
                "embedding.",
                "positions.",
                "encoder_bias.",
                "decoder_bias.",
                "head.",
            ]
            .map(str::to_string)
            .to_vec(),
            momentum_buffer: StateDtype::F32,
            adamw: AdamWConfig::new(),
        }
    }
}

/// The factor on the update of a matrix of shape `[in, out]`, the layout of Burn's layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[derive(JsonSchema)]
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
#[derive(JsonSchema)]
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
        check_dtype("dtype", self.iteration_dtype())?;
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

    /// The type of the Newton-Schulz iteration.
    pub(super) fn iteration_dtype(&self) -> FloatDType {
        self.dtype.unwrap_or_default().into()
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
