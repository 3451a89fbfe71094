use burn::{config::Config, tensor::FloatDType};
use megaburn_collective::ProcessGroups;
use megaburn_mesh::ParamSpec;
use serde::{Deserialize, Serialize};

use super::{Muon, NewtonSchulz};
use crate::{
    AdamWConfig, OptimError, Optimizer, Sharding,
    rule::{Rule, check, check_decay, check_dtype},
};

/// Muon: a matrix moves along the orthogonal matrix next to the mean of its gradients, everything else
/// by AdamW. The learning rate is given to each step, the same for both; so is the weight decay, which
/// is decoupled.
///
/// A fused matrix is several: those of query, key and value, of gate and up, are made orthogonal each by
/// itself (Megatron-LM's `--muon-split-qkv`, which leaves gate and up together).
///
/// Where optimizer state is shared out, the mean is: it is sent to one of the ranks that share, which has
/// the work of a matrix, and its result back. An update holds directions of all matrices that a rank keeps
/// something of, four bytes an element, and as much again while they are sent.
///
/// Source: Jordan et al. 2024, <https://kellerjordan.github.io/posts/muon>; Megatron-LM
/// `megatron/core/optimizer/muon.py`.
#[derive(Config, Debug, PartialEq)]
pub struct MuonConfig {
    /// Decay of the mean of gradients.
    #[config(default = 0.95)]
    pub momentum: f64,
    /// Whether a step looks ahead by the gradient it has (Nesterov).
    #[config(default = true)]
    pub nesterov: bool,
    /// Steps of the Newton-Schulz iteration.
    #[config(default = 5)]
    pub num_ns_steps: usize,
    /// Its polynomials.
    #[config(default = "NewtonSchulz::Quintic")]
    pub coefficients: NewtonSchulz,
    /// In what it is computed.
    #[config(default = "FloatDType::F32")]
    pub dtype: FloatDType,
    /// How far a matrix moves by its sizes.
    #[config(default = "MuonScale::Spectral")]
    pub scale: MuonScale,
    /// Multiplied with that. With `Spectral`, 0.2 moves elements about as far as AdamW would (Liu et al.
    /// 2025, <https://arxiv.org/abs/2502.16982>), which has the same learning rate here. Megatron-LM's
    /// default is 1.
    #[config(default = 0.2)]
    pub extra_scale: f64,
    /// How ranks that share a matrix make it orthogonal.
    #[config(default = "MuonTpMode::Duplicated")]
    pub tp_mode: MuonTpMode,
    /// Beginnings of the paths of matrices that AdamW moves.
    #[config(default = r#"["embedding.", "positions.", "head."].map(str::to_string).to_vec()"#)]
    pub excluded: Vec<String>,
    /// In what the mean of gradients is kept. In bf16 a step changes it only by more than 1/512 of itself.
    #[config(default = "FloatDType::F32")]
    pub momentum_buffer: FloatDType,
    /// What moves everything that is no matrix; its `weight_decay` and `main_params` are the matrices' too.
    #[config(default = "AdamWConfig::new()")]
    pub adamw: AdamWConfig,
}

/// What the update of an `[in, out]` matrix, as Burn's layers hold it, is multiplied with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MuonScale {
    /// The root of the larger size.
    #[default]
    Spectral,
    /// The root of out / in.
    UnitRmsNorm,
    /// The same, where out is larger.
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

/// How tensor-parallel ranks make a matrix orthogonal that each has a shard of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MuonTpMode {
    /// Each gathers and computes the whole: one rank's result.
    #[default]
    Duplicated,
    /// Each its shard, adding up products: one rank's result but for rounding.
    Distributed,
    /// Each its shard as if it were a matrix by itself: nothing is sent, and another number of ranks is
    /// another optimizer.
    Blockwise,
}

impl MuonConfig {
    /// The optimizer, before its first step; of its state a rank keeps what `sharding` says. Of `groups` it
    /// takes those that share matrices.
    ///
    /// # Errors
    /// A momentum outside `[0, 1)`, steps that are not what the polynomials were made for, a scale that is
    /// not positive, state in f16 or f64, or what [`AdamWConfig::init`] refuses.
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

    /// Whether it is a matrix that it makes orthogonal.
    pub(in crate::rule) fn is_orthogonalized(&self, path: &str, spec: &ParamSpec) -> bool {
        let is_excluded = self
            .excluded
            .iter()
            .any(|start| path.starts_with(start.as_str()));
        spec.shard.global_shape.len() == 2 && !is_excluded
    }
}
