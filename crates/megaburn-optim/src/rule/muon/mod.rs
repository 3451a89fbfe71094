//! Momentum with orthogonalized matrices.

mod config;
mod newton_schulz;
mod owners;
mod shards;

use std::collections::BTreeMap;

use burn::{Tensor, tensor::DType};
use megaburn_collective::Group;
use megaburn_kernels::{SgdState, SgdStep, sgd, sgd_scaled};
use megaburn_mesh::ParamSpec;

use super::{ParamState, Rates, UpdateInputs};
use crate::{
    accumulator::GradientAccumulator, error::OptimError, moment::Moment, moment_bits::MomentPlace,
    offload::Store, param_grad::ParamGrad, sharding::ParamKind, state_dtype::StateDtype,
};
pub use config::{MuonConfig, MuonScale, MuonTpMode};
pub use newton_schulz::NewtonSchulz;
use owners::MatrixOwners;
use shards::Orthogonalizer;

/// A [`MuonConfig`] and the groups that shard matrices.
#[derive(Clone, Debug)]
pub(crate) struct Muon {
    config: MuonConfig,
    tp: Group,
    /// The group that shards an expert's matrices.
    etp: Group,
}

impl Muon {
    pub(crate) fn config(&self) -> &MuonConfig {
        &self.config
    }

    pub(super) fn moments(&self, path: &str, spec: &ParamSpec) -> Vec<(Moment, StateDtype)> {
        if self.config.is_orthogonalized(path, spec) {
            vec![(Moment::MomentumBuffer, self.config.momentum_buffer)]
        } else {
            self.config.adamw.moments()
        }
    }

    /// The directions of all matrices, for the part that this rank keeps of each.
    pub(super) fn directions(
        &self,
        grads: &GradientAccumulator,
        state: &mut Store,
        time: u64,
    ) -> Result<BTreeMap<String, Tensor<1>>, OptimError> {
        let mut directions = BTreeMap::new();
        for kind in ParamKind::ALL {
            directions.extend(self.directions_of(kind, grads, state, time)?);
        }
        Ok(directions)
    }

    fn directions_of(
        &self,
        kind: ParamKind,
        grads: &GradientAccumulator,
        state: &mut Store,
        time: u64,
    ) -> Result<BTreeMap<String, Tensor<1>>, OptimError> {
        let matrices = grads.entries.iter();
        let matrices = matrices.filter(|(path, _)| grads.sharding.kind_of(path) == kind);
        let matrices = matrices.filter(|(path, e)| self.config.is_orthogonalized(path, &e.spec));
        let matrices: BTreeMap<&str, &ParamGrad> = matrices.map(|(p, e)| (p.as_str(), e)).collect();
        let momenta = matrices.iter().map(|(path, entry)| {
            let place = MomentPlace {
                path,
                moment: Moment::MomentumBuffer,
                dtype: self.config.momentum_buffer,
                range: entry.kept.clone(),
                time,
            };
            (path.to_string(), self.momentum(grads, entry, &place, state))
        });
        let tp = if kind == ParamKind::Expert {
            &self.etp
        } else {
            &self.tp
        };
        let shards = Orthogonalizer::new(&self.config, tp);
        let local =
            |path: &str, momentum: Tensor<1>| shards.of(&matrices[path].spec.shard, momentum);
        if grads.sharding.replicas(kind).num_shares() == 1 {
            return momenta
                .map(|(path, m)| local(&path, m).map(|m| (path, m)))
                .collect();
        }
        let momenta = momenta.collect();
        let sizes = matrices
            .iter()
            .map(|(path, entry)| (*path, &entry.spec.shard));
        MatrixOwners::new(&grads.sharding, kind, sizes).each_full_matrix(momenta, local)
    }

    /// Updates the mean of gradients and returns it in f32, looking ahead if Nesterov momentum is
    /// on. If the gradient is not finite, the stored mean does not change.
    fn momentum(
        &self,
        grads: &GradientAccumulator,
        entry: &ParamGrad,
        place: &MomentPlace<'_>,
        state: &mut Store,
    ) -> Tensor<1> {
        let MuonConfig {
            momentum, nesterov, ..
        } = self.config;
        if entry.kept.is_empty() {
            let none = Tensor::empty([0], (&entry.device, DType::F32));
            state.put_moment(place, none.clone());
            return none;
        }
        let grad = entry
            .grad_or_zeros()
            .cast(DType::F32)
            .mul_scalar(grads.factor);
        let grad = match grads.factor_on_gpu.clone() {
            Some(factor) => grad * factor,
            None => grad,
        };
        let dtype = DType::from(place.dtype.computed());
        let old = state.take_moment(place);
        let old = old.unwrap_or_else(|| grad.zeros_like().cast(dtype));
        let ahead = |mean: Tensor<1>| mean * momentum + grad.clone() * (1.0 - momentum);
        let new = ahead(old.clone().cast(DType::F32)).cast(dtype);
        let new = match grads.factor_on_gpu.clone() {
            Some(factor) => old.mask_where(factor.is_finite().expand(new.dims()), new),
            None => new,
        };
        state.put_moment(place, new.clone());
        let new = new.cast(DType::F32);
        if nesterov { ahead(new) } else { new }
    }

    pub(super) fn update(&self, old: ParamState, force: UpdateInputs) -> ParamState {
        let Some(direction) = force.direction else {
            return self.config.adamw.update(old, force);
        };
        let Rates { lr, weight_decay } = force.rates;
        // Without momentum, SGD's decay, which is added to the direction, is a decoupled decay.
        let momentum = 0.0;
        let nesterov = false;
        let grad_factor = 1.0;
        let step = SgdStep {
            lr,
            momentum,
            nesterov,
            weight_decay,
            grad_factor,
        };
        let param = old.param;
        let rounded = old.rounded;
        let moments = old.moments;
        let old = SgdState {
            param,
            momentum_buffer: None,
            rounded,
        };
        let SgdState { param, rounded, .. } = match force.factor_on_gpu {
            // The direction already includes the factor. This is 1 if the factor is finite and NaN
            // otherwise.
            Some(factor) => sgd_scaled(old, direction, factor * 0.0 + 1.0, &step),
            None => sgd(old, direction, &step),
        };
        ParamState {
            param,
            rounded,
            moments,
            amax: None,
        }
    }
}
