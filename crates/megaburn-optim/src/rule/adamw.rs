use burn::{
    config::Config,
    tensor::{FloatDType, Tensor},
};
use megaburn_kernels::{AdamwState, AdamwStep, adamw, adamw_all, adamw_all_observed, adamw_scaled};

use super::{ParamState, Rates, Rule, UpdateInputs, check, check_decay, check_weight_decay};
use crate::{
    error::OptimError,
    moment::Moment,
    optimizer::Optimizer,
    sharding::Sharding,
    state_dtype::{StateDtype, check_dtype},
};

/// AdamW as in `torch.optim.AdamW`: both moments are bias-corrected, epsilon is added outside the
/// root, and weight decay is decoupled. The defaults are those common for large language models.
/// The learning rate is an argument of each step.
///
/// Burn's `AdamW` is not used, for two reasons: it keys its state by Burn's `ParamId`, which is
/// random in every process, and it counts time per parameter and corrects the bias in f32, which at
/// `beta_2 = 0.999` loses five digits in the first updates.
///
/// Source: Loshchilov and Hutter 2019, <https://arxiv.org/abs/1711.05101>.
#[derive(Config, Debug, PartialEq)]
pub struct AdamWConfig {
    /// Decay rate of the mean of gradients.
    #[config(default = 0.9)]
    pub beta_1: f64,
    /// Decay rate of the mean of squared gradients.
    #[config(default = 0.95)]
    pub beta_2: f64,
    /// Added to the root of the second moment.
    #[config(default = 1e-8)]
    pub epsilon: f64,
    /// Decoupled weight decay, for parameters of two or more dimensions.
    #[config(default = 0.1)]
    pub weight_decay: f64,
    /// The type of what is updated. With F32, f32 masters of narrower parameters. With a narrower
    /// type, parameters of that type are updated themselves, as in PyTorch's AdamW; updates smaller
    /// than half the distance to the next number are then lost (Megatron's `--main-params-dtype`).
    #[config(default = "FloatDType::F32")]
    pub main_params: FloatDType,
    /// Type of the stored mean of gradients (`--exp-avg-dtype`). In bf16, a step changes the mean
    /// only by more than 1/512 of itself: with `beta_1` above 0.998 it would not decay.
    #[config(default = "StateDtype::F32")]
    pub exp_avg: StateDtype,
    /// Type of the stored mean of squared gradients (`--exp-avg-sq-dtype`). In bf16, with a
    /// `beta_2` of 0.999, the mean grows with large gradients and never falls.
    #[config(default = "StateDtype::F32")]
    pub exp_avg_sq: StateDtype,
}

impl AdamWConfig {
    /// The optimizer before its first step. A rank keeps the part of its state that `sharding`
    /// assigns to it.
    ///
    /// # Errors
    /// A beta is outside `[0, 1)`, epsilon is not positive, the weight decay is negative, or a
    /// state type is f16 (squared gradients easily fall below its smallest numbers) or f64.
    pub fn init(&self, sharding: &Sharding) -> Result<Optimizer, OptimError> {
        self.validate()?;
        Ok(Optimizer::new(Rule::AdamW(self.clone()), sharding))
    }

    pub(super) fn validate(&self) -> Result<(), OptimError> {
        check_decay("beta_1", self.beta_1)?;
        check_decay("beta_2", self.beta_2)?;
        check("epsilon", self.epsilon, self.epsilon > 0.0, "positive")?;
        check_weight_decay(self.weight_decay)?;
        check_dtype("main_params", self.main_params)
    }

    pub(super) fn moments(&self) -> Vec<(Moment, StateDtype)> {
        vec![
            (Moment::ExpAvg, self.exp_avg),
            (Moment::ExpAvgSq, self.exp_avg_sq),
        ]
    }

    pub(super) fn update(&self, old: ParamState, force: UpdateInputs) -> ParamState {
        let step = self.step(&force);
        let UpdateInputs {
            grad,
            factor_on_gpu,
            ..
        } = force;
        values(match factor_on_gpu {
            Some(factor) => adamw_scaled(state(old), grad, factor, &step),
            None => adamw(state(old), grad, &step),
        })
    }

    /// Updates several parameters and returns them in the same order. Parameters with the same
    /// rates are stepped together.
    pub(super) fn update_all(
        &self,
        all: impl Iterator<Item = (ParamState, UpdateInputs)>,
    ) -> Vec<ParamState> {
        let mut together: Vec<MultiTensorBatch> = Vec::new();
        for (i, (old, force)) in all.enumerate() {
            let step = self.step(&force);
            let UpdateInputs {
                grad,
                factor_on_gpu: factor,
                finds_amax,
                ..
            } = force;
            let place = together
                .iter()
                .position(|others| (others.step, others.finds_amaxes) == (step, finds_amax));
            let place = place.unwrap_or_else(|| {
                together.push(MultiTensorBatch {
                    step,
                    factor,
                    finds_amaxes: finds_amax,
                    places: Vec::new(),
                    olds: Vec::new(),
                });
                together.len() - 1
            });
            together[place].places.push(i);
            together[place].olds.push((state(old), grad));
        }
        let new = together.into_iter().flat_map(
            |MultiTensorBatch {
                 step,
                 factor,
                 finds_amaxes,
                 places,
                 olds,
             }| {
                let new = match finds_amaxes {
                    true => adamw_all_observed(olds, factor, &step),
                    false => {
                        let new = adamw_all(olds, factor, &step);
                        new.into_iter().map(|state| (state, None)).collect()
                    }
                };
                places.into_iter().zip(new)
            },
        );
        let mut new: Vec<_> = new.collect();
        new.sort_unstable_by_key(|(i, _)| *i);
        let with_amax = |(_, (state, amax))| ParamState {
            amax,
            ..values(state)
        };
        new.into_iter().map(with_amax).collect()
    }

    fn step(&self, force: &UpdateInputs) -> AdamwStep {
        let Self {
            beta_1,
            beta_2,
            epsilon,
            ..
        } = *self;
        let UpdateInputs {
            factor: grad_factor,
            rates: Rates { lr, weight_decay },
            time,
            ..
        } = *force;
        AdamwStep {
            lr,
            beta_1,
            beta_2,
            epsilon,
            weight_decay,
            grad_factor,
            time,
        }
    }
}

/// Parameters that are stepped together, and their positions among all.
struct MultiTensorBatch {
    step: AdamwStep,
    /// Shared by all parameters; see [`Rule::update_all`].
    factor: Option<Tensor<1>>,
    finds_amaxes: bool,
    places: Vec<usize>,
    olds: Vec<(AdamwState, Tensor<1>)>,
}

fn state(mut old: ParamState) -> AdamwState {
    let [exp_avg, exp_avg_sq] = [Moment::ExpAvg, Moment::ExpAvgSq].map(|m| old.take(m));
    AdamwState {
        param: old.param,
        exp_avg,
        exp_avg_sq,
        rounded: old.rounded,
    }
}

fn values(new: AdamwState) -> ParamState {
    let AdamwState {
        param,
        exp_avg,
        exp_avg_sq,
        rounded,
    } = new;
    let moments = [(Moment::ExpAvg, exp_avg), (Moment::ExpAvgSq, exp_avg_sq)].into();
    ParamState {
        param,
        rounded,
        moments,
        amax: None,
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use rstest::rstest;

    use super::*;
    use crate::{
        accumulator::GradientAccumulator,
        testing::{Net, plan_of, values},
    };

    /// One parameter element under `torch.optim.AdamW`, in f64.
    #[derive(Clone, Copy, Default)]
    struct Torch {
        p: f64,
        m: f64,
        v: f64,
    }

    impl Torch {
        fn step(&mut self, config: &AdamWConfig, lr: f64, decay: f64, g: f64, t: i32) {
            let AdamWConfig {
                beta_1,
                beta_2,
                epsilon,
                ..
            } = *config;
            self.p *= 1.0 - lr * decay;
            self.m = beta_1 * self.m + (1.0 - beta_1) * g;
            self.v = beta_2 * self.v + (1.0 - beta_2) * g * g;
            let denominator = (self.v / (1.0 - beta_2.powi(t))).sqrt() + epsilon;
            self.p -= lr * (self.m / (1.0 - beta_1.powi(t))) / denominator;
        }
    }

    #[rstest]
    #[case(AdamWConfig::new(), 2, 6, 1e-3)]
    #[case(AdamWConfig::new().with_beta_2(0.999).with_weight_decay(0.5), 3, 4, 3e-2)]
    #[case(AdamWConfig::new().with_beta_1(0.0).with_epsilon(1e-2), 1, 2, 1e-1)]
    fn steps_are_those_of_torch(
        #[case] config: AdamWConfig,
        #[case] rows: usize,
        #[case] cols: usize,
        #[case] lr: f64,
    ) {
        let device = Device::default().autodiff();
        let mut net = Net::new(rows, cols, 0, 1, &device);
        let mut grads =
            GradientAccumulator::new(&net, &plan_of(rows, cols, 0, 1), &Sharding::none()).unwrap();
        let mut optimizer = config.init(&Sharding::none()).unwrap();
        let start = |p: f32| Torch {
            p: f64::from(p),
            ..Default::default()
        };
        let all = |net: &Net| [values(net.matrix.val()), values(net.bias.val())];
        let mut expected = all(&net).map(|ps| ps.into_iter().map(start).collect::<Vec<_>>());
        for t in 1..=12 {
            // The gradients of sum(matrix²) and sum(bias²) at the current parameters.
            let loss = net.matrix.val().square().sum() + net.bias.val().square().sum();
            grads.reset();
            grads.accumulate(&net, &mut loss.backward());
            let before = all(&net);
            let lr = lr / f64::from(t);
            net = optimizer.step(lr, net, &grads).unwrap();
            for (which, decay) in [(0, config.weight_decay), (1, 0.0)] {
                let after = &all(&net)[which];
                for (i, torch) in expected[which].iter_mut().enumerate() {
                    torch.step(&config, lr, decay, 2.0 * f64::from(before[which][i]), t);
                    let error = (f64::from(after[i]) - torch.p).abs();
                    assert!(
                        error <= 1e-6 * torch.p.abs().max(0.1),
                        "step {t}: {} {}",
                        after[i],
                        torch.p
                    );
                }
            }
        }
        assert_eq!(optimizer.time(), 12);
    }

    #[test]
    fn parameters_of_two_rates_stay_in_their_order() {
        let device = Device::default();
        let config = AdamWConfig::new();
        let of = |i: usize| {
            let tensor = |x: f64| Tensor::<1>::full([3 + i], x * (1.0 + i as f64), &device);
            let moments = [
                (Moment::ExpAvg, tensor(0.1)),
                (Moment::ExpAvgSq, tensor(0.2)),
            ]
            .into();
            let old = ParamState {
                param: tensor(1.0),
                rounded: None,
                moments,
                amax: None,
            };
            // The first, third and fifth parameter have different rates from the others.
            let rates = Rates {
                lr: if i.is_multiple_of(2) { 1e-1 } else { 3e-1 },
                weight_decay: 0.1,
            };
            let factor_on_gpu = Some(Tensor::from_floats([0.5], &device));
            let direction = None;
            let grad = tensor(-2.0);
            (
                old,
                UpdateInputs {
                    grad,
                    factor: 0.7,
                    factor_on_gpu,
                    direction,
                    rates,
                    time: 2,
                    finds_amax: false,
                },
            )
        };
        let of_values = |new: ParamState| {
            let moments = new.moments.into_values();
            [new.param]
                .into_iter()
                .chain(moments)
                .map(values)
                .collect::<Vec<_>>()
        };
        let found = config.update_all((0..6).map(of)).into_iter().map(of_values);
        let alone = (0..6)
            .map(of)
            .map(|(old, force)| of_values(config.update(old, force)));
        assert_eq!(found.collect::<Vec<_>>(), alone.collect::<Vec<_>>());
    }

    #[test]
    fn impossible_configs_are_refused() {
        for (config, message) in [
            (
                AdamWConfig::new().with_beta_2(1.0),
                "beta_2 is 1; it must be at least 0 and below 1",
            ),
            (AdamWConfig::new().with_beta_1(f64::NAN), "beta_1 is NaN"),
            (
                AdamWConfig::new().with_epsilon(0.0),
                "epsilon is 0; it must be positive",
            ),
            (
                AdamWConfig::new().with_weight_decay(-0.1),
                "weight_decay is -0.1",
            ),
        ] {
            let error = config.init(&Sharding::none()).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
        let config = AdamWConfig::new().with_main_params(FloatDType::F16);
        let error = config.init(&Sharding::none()).unwrap_err().to_string();
        let message = "main_params cannot be stored in F16";
        assert!(
            error.contains(message) && error.contains("F32 or BF16"),
            "{error}"
        );
    }
}
