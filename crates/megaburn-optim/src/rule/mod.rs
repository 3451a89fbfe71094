//! The update rules of the optimizers.

mod adamw;
mod lion;
mod muon;
mod sgd;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use burn::{Tensor, tensor::FloatDType};
use megaburn_mesh::ParamSpec;

use crate::{
    accumulator::GradientAccumulator, error::OptimError, moment::Moment, offload::Store,
    state_dtype::StateDtype,
};
pub use adamw::AdamWConfig;
pub use lion::LionConfig;
pub(crate) use muon::Muon;
pub use muon::{MuonConfig, MuonScale, MuonTpMode, NewtonSchulz};
pub use sgd::SgdConfig;

/// The optimizer state of one parameter apart from its master, flat.
pub(crate) type Moments = BTreeMap<Moment, Tensor<1>>;

/// The rates of a parameter's update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Learning rate.
    pub lr: f64,
    /// Weight decay.
    pub weight_decay: f64,
}

/// The update rule of an optimizer.
#[derive(Clone, Debug)]
pub(crate) enum Rule {
    AdamW(AdamWConfig),
    Sgd(SgdConfig),
    Lion(LionConfig),
    Muon(Muon),
}

/// The input and the result of one parameter's update. Each tensor is `[kept elements]`.
pub(crate) struct ParamState {
    /// The parameter or its master.
    pub(crate) param: Tensor<1>,
    /// Receives the new parameter, rounded to its type.
    pub(crate) rounded: Option<Tensor<1>>,
    pub(crate) moments: Moments,
    /// The largest magnitude of the new parameter, if it was found, `[1]` in f32.
    pub(crate) amax: Option<Tensor<1>>,
}

/// The gradient and rates of an update.
pub(crate) struct UpdateInputs {
    pub(crate) grad: Tensor<1>,
    /// Pending scale of the gradient.
    pub(crate) factor: f64,
    /// Pending scale that is known only on the GPU. If it is not finite, nothing changes.
    pub(crate) factor_on_gpu: Option<Tensor<1>>,
    /// Used in place of the gradient, which it already includes.
    pub(crate) direction: Option<Tensor<1>>,
    pub(crate) rates: Rates,
    /// The number of this step, from 1.
    pub(crate) time: u64,
    /// Whether to find the largest magnitude of the new parameter, if the rule can.
    pub(crate) finds_amax: bool,
}

impl Rule {
    /// The name as in Megatron's `--optimizer`.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::AdamW(_) => "adamw",
            Self::Sgd(_) => "sgd",
            Self::Lion(_) => "lion",
            Self::Muon(_) => "muon",
        }
    }

    pub(crate) fn weight_decay(&self) -> f64 {
        match self {
            Self::AdamW(config) => config.weight_decay,
            Self::Sgd(config) => config.weight_decay,
            Self::Lion(config) => config.weight_decay,
            Self::Muon(muon) => muon.config().adamw.weight_decay,
        }
    }

    pub(crate) fn main_params(&self) -> FloatDType {
        match self {
            Self::AdamW(config) => config.main_params,
            Self::Sgd(config) => config.main_params,
            Self::Lion(config) => config.main_params,
            Self::Muon(muon) => muon.config().adamw.main_params,
        }
    }

    /// The moments that the rule keeps for a parameter, and their types.
    pub(crate) fn moments(&self, path: &str, spec: &ParamSpec) -> Vec<(Moment, StateDtype)> {
        match self {
            Self::AdamW(config) => config.moments(),
            Self::Sgd(config) => config.moments(),
            Self::Lion(config) => config.moments(),
            Self::Muon(muon) => muon.moments(path, spec),
        }
    }

    /// Whether the parameter has an entry in [`directions`](Self::directions), which then includes
    /// its moments.
    pub(crate) fn has_direction(&self, path: &str, spec: &ParamSpec) -> bool {
        match self {
            Self::Muon(muon) => muon.config().is_orthogonalized(path, spec),
            Self::AdamW(_) | Self::Sgd(_) | Self::Lion(_) => false,
        }
    }

    /// The directions of matrices by path, for rules whose update needs more than one element at a
    /// time.
    pub(crate) fn directions(
        &self,
        grads: &GradientAccumulator,
        state: &mut Store,
        time: u64,
    ) -> Result<BTreeMap<String, Tensor<1>>, OptimError> {
        match self {
            Self::Muon(muon) => muon.directions(grads, state, time),
            Self::AdamW(_) | Self::Sgd(_) | Self::Lion(_) => Ok(BTreeMap::new()),
        }
    }

    /// Updates several parameters and returns them in the same order. `factor_on_gpu` is the same
    /// for all.
    pub(crate) fn update_all(&self, all: Vec<(ParamState, UpdateInputs)>) -> Vec<ParamState> {
        let all = all.into_iter();
        match self {
            Self::AdamW(config) => config.update_all(all),
            Self::Sgd(config) => all.map(|(old, force)| config.update(old, force)).collect(),
            Self::Lion(config) => all.map(|(old, force)| config.update(old, force)).collect(),
            Self::Muon(muon) => all.map(|(old, force)| muon.update(old, force)).collect(),
        }
    }
}

impl ParamState {
    /// Takes one of the moments.
    fn take(&mut self, moment: Moment) -> Tensor<1> {
        self.moments
            .remove(&moment)
            .expect("the rule has this moment")
    }
}

/// Refuses a number that an optimizer cannot work with.
fn check(
    name: &'static str,
    value: f64,
    ok: bool,
    must_be: &'static str,
) -> Result<(), OptimError> {
    if ok {
        Ok(())
    } else {
        Err(OptimError::BadConfig {
            name,
            value,
            must_be,
        })
    }
}

fn check_decay(name: &'static str, beta: f64) -> Result<(), OptimError> {
    check(
        name,
        beta,
        (0.0..1.0).contains(&beta),
        "at least 0 and below 1",
    )
}

fn check_weight_decay(weight_decay: f64) -> Result<(), OptimError> {
    let ok = weight_decay >= 0.0 && weight_decay.is_finite();
    check("weight_decay", weight_decay, ok, "at least 0 and finite")
}
