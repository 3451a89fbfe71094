use std::collections::BTreeMap;

use burn::{
    Tensor,
    tensor::{DType, FloatDType},
};

use megaburn_kernels::{AdamwState, AdamwStep, adamw, adamw_scaled};

use crate::{AdamWConfig, GradientAccumulator, Sharding};

/// AdamW on the shards of a rank, its state keyed by path. The formula is `torch.optim.AdamW`'s:
/// bias correction of both moments, epsilon outside the root, decay decoupled.
///
/// Burn's `AdamW` is not used: it keeps its state under Burn's `ParamId`, which is random in every
/// process, one time a parameter, and corrects the bias in f32, which at `beta_2 = 0.999` costs
/// five digits of the first updates.
///
/// Source: Loshchilov and Hutter 2019, <https://arxiv.org/abs/1711.05101>.
#[derive(Clone, Debug)]
pub struct AdamW {
    config: AdamWConfig,
    pub(crate) sharding: Sharding,
    pub(crate) time: u64,
    pub(crate) moments: BTreeMap<String, Moments>,
    /// Of parameters whose masters are updated, by path: what this rank keeps of them, f32.
    pub(crate) masters: BTreeMap<String, Tensor<1>>,
}

/// What an update of a parameter uses beside its gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Learning rate.
    pub lr: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

/// The state of what a rank keeps of one parameter.
#[derive(Clone, Debug)]
pub(crate) struct Moments {
    pub(crate) exp_avg: Tensor<1>,
    pub(crate) exp_avg_sq: Tensor<1>,
}

impl AdamW {
    /// Before its first step.
    pub(crate) fn new(config: AdamWConfig, sharding: Sharding) -> Self {
        let (moments, masters) = Default::default();
        Self { config, sharding, time: 0, moments, masters }
    }

    /// The configuration.
    pub fn config(&self) -> &AdamWConfig {
        &self.config
    }

    /// Steps taken.
    pub fn time(&self) -> u64 {
        self.time
    }

    /// Takes back the count of the last step, if there was one, which turned out to have done nothing.
    pub fn uncount(&mut self) {
        self.time = self.time.saturating_sub(1);
    }

    /// Updates what this rank keeps of one parameter, or its master: the new values in the type of the
    /// `old` ones.
    pub(crate) fn update(
        &mut self,
        path: &str,
        old: Tensor<1>,
        grads: &GradientAccumulator,
        rates: Rates,
    ) -> Tensor<1> {
        if !self.has_master(old.dtype()) {
            return self.update_with(path, old, None, grads, rates).0;
        }
        let master = self.masters.remove(path).unwrap_or_else(|| old.clone().cast(DType::F32));
        // The old values' memory takes the new.
        let (master, rounded) = self.update_with(path, master, Some(old), grads, rates);
        self.masters.insert(path.to_string(), master);
        rounded.expect("it was given what to round to")
    }

    /// That this rank keeps nothing of a parameter: its state is there, and empty.
    pub(crate) fn keep_nothing(&mut self, path: &str, nothing: Tensor<1>) {
        let empty = |dtype: FloatDType| nothing.clone().cast(dtype);
        let AdamWConfig { exp_avg, exp_avg_sq, .. } = self.config;
        let moments = Moments { exp_avg: empty(exp_avg), exp_avg_sq: empty(exp_avg_sq) };
        self.moments.insert(path.to_string(), moments);
        if self.has_master(nothing.dtype()) {
            self.masters.insert(path.to_string(), empty(FloatDType::F32));
        }
    }

    fn update_with(
        &mut self,
        path: &str,
        param: Tensor<1>,
        rounded: Option<Tensor<1>>,
        grads: &GradientAccumulator,
        rates: Rates,
    ) -> (Tensor<1>, Option<Tensor<1>>) {
        let entry = &grads.entries[path];
        let AdamWConfig { beta_1, beta_2, epsilon, .. } = self.config;
        let zeros = |dtype: FloatDType| {
            Tensor::zeros([entry.kept.len()], (&entry.device, DType::from(dtype)))
        };
        let old = self.moments.remove(path).unwrap_or_else(|| Moments {
            exp_avg: zeros(self.config.exp_avg),
            exp_avg_sq: zeros(self.config.exp_avg_sq),
        });
        let Rates { lr, weight_decay } = rates;
        let weight_decay = if entry.spec.decays() { weight_decay } else { 0.0 };
        let (time, grad_factor) = (self.time, grads.factor);
        let step = AdamwStep { lr, beta_1, beta_2, epsilon, weight_decay, grad_factor, time };
        let Moments { exp_avg, exp_avg_sq } = old;
        let old = AdamwState { param, exp_avg, exp_avg_sq, rounded };
        let grad = entry.grad_or_zeros();
        let new = match grads.factor_on_gpu.clone() {
            Some(factor) => adamw_scaled(old, grad, factor, &step),
            None => adamw(old, grad, &step),
        };
        let AdamwState { param, exp_avg, exp_avg_sq, rounded } = new;
        self.moments.insert(path.to_string(), Moments { exp_avg, exp_avg_sq });
        (param, rounded)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use rstest::rstest;

    use super::*;
    use crate::testing::{Net, plan_of, values};

    /// One parameter element under `torch.optim.AdamW`, in f64.
    #[derive(Clone, Copy, Default)]
    struct Torch {
        p: f64,
        m: f64,
        v: f64,
    }

    impl Torch {
        fn step(&mut self, config: &AdamWConfig, lr: f64, decay: f64, g: f64, t: i32) {
            let AdamWConfig { beta_1, beta_2, epsilon, .. } = *config;
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
        let start = |p: f32| Torch { p: f64::from(p), ..Default::default() };
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
    fn each_parameter_has_its_own_rates() {
        let device = Device::default().autodiff();
        let net = || {
            let mut net = Net::new(2, 4, 0, 1, &device);
            net.matrix = net.matrix.map(|t| t.inner().ones_like().autodiff().require_grad());
            net.bias = net.bias.map(|t| t.inner().ones_like().autodiff().require_grad());
            net
        };
        let step = |rates: &dyn Fn(&str) -> Rates| {
            let net = net();
            let mut grads =
                GradientAccumulator::new(&net, &plan_of(2, 4, 0, 1), &Sharding::none()).unwrap();
            let loss = net.matrix.val().sum() + net.bias.val().sum();
            grads.accumulate(&net, &mut loss.backward());
            let mut optimizer =
                AdamWConfig::new().with_epsilon(1e-12).init(&Sharding::none()).unwrap();
            let net = optimizer.step_with(rates, net, &grads).unwrap();
            [values(net.matrix.val())[0], values(net.bias.val())[0]]
        };
        // The first update is the learning rate; a bias does not decay whatever its rates say.
        let rates = |path: &str| match path {
            "matrix" => Rates { lr: 0.125, weight_decay: 2.0 },
            _ => Rates { lr: 0.25, weight_decay: 2.0 },
        };
        assert_eq!(step(&rates), [1.0 - 0.25 - 0.125, 0.75]);
        assert_eq!(step(&|_| Rates { lr: 0.0, weight_decay: 2.0 }), [1.0, 1.0]);
    }

    #[test]
    fn parameters_stay_leaves_and_frozen_ones_stay() {
        let device = Device::default().autodiff();
        let mut net = Net::new(3, 4, 0, 1, &device);
        net.bias = net.bias.set_require_grad(false);
        let mut grads =
            GradientAccumulator::new(&net, &plan_of(3, 4, 0, 1), &Sharding::none()).unwrap();
        let mut optimizer = AdamWConfig::new().init(&Sharding::none()).unwrap();
        let (bias, id) = (values(net.bias.val()), net.matrix.id);
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
        net.matrix =
            net.matrix.map(|t| t.inner().slice_fill([1..4, 0..6], 0.0).autodiff().require_grad());
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
