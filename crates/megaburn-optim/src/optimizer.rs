use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
};

use burn::{Tensor, tensor::DType};
use megaburn_kernels::master_remainder;

use crate::{
    accumulator::GradientAccumulator,
    amaxes::ParamAmaxes,
    moment_bits::MomentPlace,
    offload::{Key, Store},
    param_grad::ParamGrad,
    rule::{Moments, ParamState, Rates, Rule, UpdateInputs},
    sharding::Sharding,
};

/// An optimizer for a rank's shards, with state keyed by path. Made by
/// [`AdamWConfig`](crate::AdamWConfig), [`SgdConfig`](crate::SgdConfig),
/// [`LionConfig`](crate::LionConfig) or [`MuonConfig`](crate::MuonConfig).
#[derive(Clone, Debug)]
pub struct Optimizer {
    pub(crate) rule: Rule,
    pub(crate) sharding: Sharding,
    pub(crate) time: u64,
    /// The parts that this rank keeps of moments and, for parameters that have one, of f32 masters.
    pub(crate) state: Store,
    /// Parameters that stay in f32.
    pub(crate) f32_params: BTreeSet<String>,
    /// Whether masters of bf16 parameters are stored as what the parameters lack of them.
    pub(crate) has_remainders: bool,
    /// Names the parameters whose largest magnitudes the next step finds, and holds the magnitudes
    /// that the last step found.
    pub(crate) amaxes: ParamAmaxes,
}

/// What an update reads: the part that this rank keeps of a parameter or its master.
pub(crate) enum Start {
    /// The parameter itself.
    Param(Tensor<1>),
    /// The stored master, or `first` if there is none yet; `dtype` is the type of the parameter.
    Master {
        first: Option<Tensor<1>>,
        dtype: DType,
    },
    /// The master of which this parameter and the stored remainder are the parts, or the parameter
    /// itself if there is no remainder yet.
    Joined(Tensor<1>),
}

/// An update of a parameter.
pub(crate) struct Update {
    pub(crate) path: String,
    pub(crate) start: Start,
    /// Output buffer for the new values of a parameter that has a master; other tensors may share
    /// it.
    pub(crate) room: Option<Tensor<1>>,
    /// The parameter's entry of [`Rule::directions`].
    pub(crate) direction: Option<Tensor<1>>,
    pub(crate) rates: Rates,
}

impl Optimizer {
    /// An optimizer before its first step.
    pub(crate) fn new(rule: Rule, sharding: &Sharding) -> Self {
        let (state, f32_params, has_remainders, amaxes) = Default::default();
        Self {
            rule,
            sharding: sharding.clone(),
            time: 0,
            state,
            f32_params,
            has_remainders,
            amaxes,
        }
    }

    /// Keeps these parameters in f32 when others are cast to a [narrower type](Self::cast_params).
    #[must_use]
    pub fn with_f32_params(mut self, paths: impl IntoIterator<Item = String>) -> Self {
        self.f32_params = paths.into_iter().collect();
        self
    }

    /// `adamw`, `sgd`, `lion` or `muon`.
    pub fn name(&self) -> &'static str {
        self.rule.name()
    }

    /// Steps taken.
    pub fn time(&self) -> u64 {
        self.time
    }

    /// Undoes the count of the last step, for a step that turned out to change nothing. Does
    /// nothing before the first step.
    pub fn revert_step_count(&mut self) {
        self.time = self.time.saturating_sub(1);
    }

    /// Sets the parameters whose largest magnitudes the next steps find while they write them.
    pub fn find_amaxes_of(&mut self, paths: impl IntoIterator<Item = String>) {
        self.amaxes.wanted = paths.into_iter().collect();
    }

    /// Takes the largest magnitudes of parameters after the last step, by path, `[1]` in f32 each. A
    /// parameter that was not wanted, that this rank does not update as a whole, or whose update rule
    /// finds none, has none. With a change to a parameter after the step its magnitude is void.
    pub fn take_amaxes(&mut self) -> BTreeMap<String, Tensor<1>> {
        mem::take(&mut self.amaxes.found)
    }

    /// What an update of a parameter of type `dtype` starts from. `param` is called only if the
    /// parameter itself is updated or becomes its first master.
    pub(crate) fn start(
        &self,
        path: &str,
        dtype: DType,
        param: impl FnOnce() -> Tensor<1>,
    ) -> Start {
        if !self.has_master(dtype) {
            return Start::Param(param());
        }
        if self.keeps_remainder(dtype) {
            return Start::Joined(param());
        }
        let is_kept = self.state.get(&Key::master(path)).is_some();
        let first = (!is_kept).then(|| param().cast(DType::F32));
        Start::Master { first, dtype }
    }

    /// Updates the kept parts of some parameters or their masters. Returns the new values in the
    /// parameters' types.
    pub(crate) fn update(
        &mut self,
        all: Vec<Update>,
        grads: &GradientAccumulator,
    ) -> Vec<Tensor<1>> {
        let paths: Vec<String> = all.iter().map(|update| update.path.clone()).collect();
        let all = all
            .into_iter()
            .map(|update| self.begin(update, grads))
            .collect();
        let new = self.rule.update_all(all);
        paths
            .iter()
            .zip(new)
            .map(|(path, new)| self.end(path, &grads.entries[path], new))
            .collect()
    }

    fn begin(&mut self, update: Update, grads: &GradientAccumulator) -> (ParamState, UpdateInputs) {
        let Update {
            path,
            start,
            room,
            direction,
            rates,
        } = update;
        let (path, entry) = (path.as_str(), &grads.entries[&path]);
        // The direction already includes the momentum.
        let moments = if direction.is_some() {
            Moments::new()
        } else {
            self.take_moments(path, entry)
        };
        let force = UpdateInputs {
            grad: entry.grad_or_zeros(),
            factor: grads.factor,
            factor_on_gpu: grads.factor_on_gpu.clone(),
            direction,
            rates: if entry.spec.decays() {
                rates
            } else {
                Rates {
                    weight_decay: 0.0,
                    ..rates
                }
            },
            time: self.time,
            finds_amax: self.amaxes.wants(path, entry),
        };
        let (param, rounded) = match start {
            Start::Param(param) => (param, None),
            Start::Master { first, dtype } => {
                let param = self.state.take(&Key::master(path)).or(first);
                let param = param.expect("the initial value is present until a master exists");
                let empty = || Tensor::empty(param.dims(), (&param.device(), dtype));
                let room = room.unwrap_or_else(empty);
                (param, Some(room))
            }
            Start::Joined(param) => {
                let dtype = param.dtype();
                let master = self.take_joined_master(path, param);
                let empty = || Tensor::empty(master.dims(), (&master.device(), dtype));
                let room = room.unwrap_or_else(empty);
                (master, Some(room))
            }
        };
        (
            ParamState {
                param,
                rounded,
                moments,
                amax: None,
            },
            force,
        )
    }

    fn end(&mut self, path: &str, entry: &ParamGrad, new: ParamState) -> Tensor<1> {
        let ParamState {
            param,
            rounded,
            moments,
            amax,
        } = new;
        self.amaxes.put(path, amax);
        self.put_moments(path, entry, moments);
        let Some(rounded) = rounded else { return param };
        let kept = match self.keeps_remainder(rounded.dtype()) {
            true => master_remainder(param, rounded.clone()),
            false => param,
        };
        self.state.put(Key::master(path), kept);
        rounded
    }

    /// Sets empty state for a parameter of which this rank keeps nothing; `nothing` is an empty
    /// tensor.
    pub(crate) fn set_empty_state(&mut self, path: &str, entry: &ParamGrad, nothing: Tensor<1>) {
        let moments = self.rule.moments(path, &entry.spec);
        let moments = moments
            .into_iter()
            .map(|(moment, _)| (moment, nothing.clone().cast(DType::F32)));
        self.put_moments(path, entry, moments.collect());
        let dtype = nothing.dtype();
        if self.has_master(dtype) {
            self.put_master(path, nothing.cast(DType::F32), dtype);
        }
    }

    /// Takes the moments of the kept part; zeros before the first step.
    fn take_moments(&mut self, path: &str, entry: &ParamGrad) -> Moments {
        let moments = self.rule.moments(path, &entry.spec).into_iter();
        let taken = moments.map(|(moment, dtype)| {
            let place = MomentPlace {
                path,
                moment,
                dtype,
                range: entry.kept.clone(),
                time: self.time,
            };
            let found = self.state.take_moment(&place);
            let place = (&entry.device, DType::from(dtype.computed()));
            let zeros = || Tensor::zeros([entry.kept.len()], place);
            (moment, found.unwrap_or_else(zeros))
        });
        taken.collect()
    }

    fn put_moments(&mut self, path: &str, entry: &ParamGrad, moments: Moments) {
        for (moment, tensor) in moments {
            let place = MomentPlace {
                path,
                moment,
                dtype: self.rule.moment_dtype(moment),
                range: entry.kept.clone(),
                time: self.time,
            };
            self.state.put_moment(&place, tensor);
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::{
        rule::AdamWConfig,
        testing::{Net, plan_of, values},
    };

    #[test]
    fn each_parameter_has_its_own_rates() {
        let device = Device::default().autodiff();
        let net = || {
            let mut net = Net::new(2, 4, 0, 1, &device);
            net.matrix = net
                .matrix
                .map(|t| t.inner().ones_like().autodiff().require_grad());
            net.bias = net
                .bias
                .map(|t| t.inner().ones_like().autodiff().require_grad());
            net
        };
        let step = |rates: &dyn Fn(&str) -> Rates| {
            let net = net();
            let mut grads =
                GradientAccumulator::new(&net, &plan_of(2, 4, 0, 1), &Sharding::none()).unwrap();
            let loss = net.matrix.val().sum() + net.bias.val().sum();
            grads.accumulate(&net, &mut loss.backward());
            let mut optimizer = AdamWConfig::new()
                .with_epsilon(1e-12)
                .init(&Sharding::none())
                .unwrap();
            let net = optimizer.step_with(rates, net, &grads).unwrap();
            [values(net.matrix.val())[0], values(net.bias.val())[0]]
        };
        // The first AdamW update moves by the learning rate; a bias does not decay whatever its
        // rates say.
        let rates = |path: &str| match path {
            "matrix" => Rates {
                lr: 0.125,
                weight_decay: 2.0,
            },
            _ => Rates {
                lr: 0.25,
                weight_decay: 2.0,
            },
        };
        assert_eq!(step(&rates), [1.0 - 0.25 - 0.125, 0.75]);
        assert_eq!(
            step(&|_| Rates {
                lr: 0.0,
                weight_decay: 2.0
            }),
            [1.0, 1.0]
        );
    }

    #[test]
    fn parameters_stay_leaves_and_frozen_ones_stay() {
        let device = Device::default().autodiff();
        let mut net = Net::new(3, 4, 0, 1, &device);
        net.bias = net.bias.set_require_grad(false);
        let mut grads =
            GradientAccumulator::new(&net, &plan_of(3, 4, 0, 1), &Sharding::none()).unwrap();
        let mut optimizer = AdamWConfig::new().init(&Sharding::none()).unwrap();
        let bias = values(net.bias.val());
        let id = net.matrix.id;
        for _ in 0..3 {
            let before = values(net.matrix.val());
            let loss = (net.matrix.val() * 3.0).sum() + net.bias.val().sum();
            grads.reset();
            grads.accumulate(&net, &mut loss.backward());
            assert_eq!(values(grads.get("matrix").unwrap()), [3.0; 12]);
            net = optimizer.step(1e-2, net, &grads).unwrap();
            assert!(net.matrix.val().is_require_grad() && net.matrix.val().is_autodiff());
            assert_ne!(values(net.matrix.val()), before);
        }
        assert_eq!(net.matrix.id, id);
        assert_eq!(values(net.bias.val()), bias);
        assert!(!net.bias.val().is_require_grad());
    }

    #[test]
    fn padding_stays_zero() {
        let device = Device::default().autodiff();
        let mut net = Net::new(5, 6, 1, 2, &device);
        net.matrix = net.matrix.map(|t| {
            t.inner()
                .slice_fill([1..4, 0..6], 0.0)
                .autodiff()
                .require_grad()
        });
        let plan = plan_of(5, 6, 1, 2);
        let mut grads = GradientAccumulator::new(&net, &plan, &Sharding::none()).unwrap();
        let mut optimizer = AdamWConfig::new().init(&Sharding::none()).unwrap();
        for _ in 0..3 {
            grads.reset();
            grads.accumulate(&net, &mut net.matrix.val().exp().sum().backward());
            grads.reduce().unwrap();
            net = optimizer.step(1e-1, net, &grads).unwrap();
        }
        let matrix = values(net.matrix.val());
        assert_eq!(matrix[6..], [0.0; 18]);
        assert!(matrix[..6].iter().all(|&x| x != 0.0));
    }
}
