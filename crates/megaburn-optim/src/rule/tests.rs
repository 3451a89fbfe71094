use burn::tensor::{Device, Tensor};
use megaburn_collective::{GroupOptions, ProcessGroups, run_threads};
use rstest::rstest;

use super::{AdamWConfig, LionConfig, MuonConfig, MuonScale, NewtonSchulz, SgdConfig};
use crate::{
    accumulator::GradientAccumulator,
    optimizer::Optimizer,
    sharding::{Sharding, ShardingConfig, ShardingLevel},
    testing::{Net, plan_of, values},
};

const LR: f64 = 3e-2;
const DECAY: f64 = 0.5;

/// One element and its momentum, in f64.
struct Element {
    p: f64,
    m: f64,
}

fn sgd(config: &SgdConfig) -> impl Fn(&mut Element, f64, f64) {
    let momentum = config.momentum;
    let nesterov = config.nesterov;
    move |e, g, decay| {
        let g = g + decay * e.p;
        e.m = momentum * e.m + g;
        e.p -= LR * if nesterov { g + momentum * e.m } else { e.m };
    }
}

fn lion(e: &mut Element, g: f64, decay: f64) {
    let toward = 0.9 * e.m + 0.1 * g;
    e.p = e.p * (1.0 - LR * decay) - LR * toward.signum();
    e.m = 0.99 * e.m + 0.01 * g;
}

/// Six steps on `sum(x²)`, with the gradient halved by the scale.
fn descend(mut optimizer: Optimizer, rule: impl Fn(&mut Element, f64, f64)) {
    let device = Device::default().autodiff();
    let mut net = Net::new(3, 4, 0, 1, &device);
    let all = |net: &Net| [values(net.matrix.val()), values(net.bias.val())];
    let start = |p: &f32| Element {
        p: f64::from(*p),
        m: 0.0,
    };
    let mut expected = all(&net).map(|ps| ps.iter().map(start).collect::<Vec<_>>());
    let mut grads =
        GradientAccumulator::new(&net, &plan_of(3, 4, 0, 1), &Sharding::none()).unwrap();
    for _ in 0..6 {
        let before = all(&net);
        let loss = net.matrix.val().square().sum() + net.bias.val().square().sum();
        grads.reset();
        grads.accumulate(&net, &mut loss.backward());
        grads.scale(0.5);
        net = optimizer.step(LR, net, &grads).unwrap();
        for (which, decay) in [(0, DECAY), (1, 0.0)] {
            for (i, found) in all(&net)[which].iter().enumerate() {
                let element = &mut expected[which][i];
                rule(element, f64::from(before[which][i]), decay);
                assert!(
                    (f64::from(*found) - element.p).abs() < 1e-6,
                    "{found} {}",
                    element.p
                );
            }
        }
    }
}

#[rstest]
#[case(0.0, false)]
#[case(0.9, false)]
#[case(0.5, true)]
fn gradients_are_followed_as_torch_does(#[case] momentum: f64, #[case] nesterov: bool) {
    let config = SgdConfig {
        momentum,
        nesterov,
        weight_decay: DECAY,
        ..SgdConfig::default()
    };
    descend(config.init(&Sharding::none()).unwrap(), sgd(&config));
}

#[test]
fn signs_are_followed() {
    let config = LionConfig {
        weight_decay: DECAY,
        ..LionConfig::default()
    };
    descend(config.init(&Sharding::none()).unwrap(), lion);
}

/// Muon with enough Newton-Schulz steps to make a matrix of full rank orthogonal.
fn muon() -> MuonConfig {
    MuonConfig {
        extra_scale: 1.0,
        num_ns_steps: 20,
        coefficients: NewtonSchulz::PolarExpress,
        ..MuonConfig::default()
    }
}

#[test]
fn a_matrix_moves_along_an_orthogonal_one_and_the_rest_as_by_adamw() {
    let device = Device::default().autodiff();
    let mut before = Net::new(3, 4, 0, 1, &device);
    // Start far from matrices of lower rank: past one of them, the second step would undo the
    // first.
    before.matrix = before.matrix.map(|noise| {
        let [rows, cols] = noise.dims();
        let plain = Tensor::<2>::eye(cols, &device.clone().inner()).narrow(0, 0, rows);
        Tensor::from_inner(plain * 2.0 + noise.inner().clamp(-1.0, 1.0) * 0.2).require_grad()
    });
    let steps = |mut optimizer: Optimizer| {
        let mut net = before.clone();
        let mut grads =
            GradientAccumulator::new(&net, &plan_of(3, 4, 0, 1), &Sharding::none()).unwrap();
        for _ in 0..2 {
            let loss = net.matrix.val().square().sum() + net.bias.val().square().sum();
            grads.reset();
            grads.accumulate(&net, &mut loss.backward());
            net = optimizer.step(LR, net, &grads).unwrap();
        }
        net
    };
    let adamw = AdamWConfig::new().with_weight_decay(0.0);
    let config = MuonConfig {
        adamw: adamw.clone(),
        scale: MuonScale::UnitRmsNorm,
        ..muon()
    };
    let expected = steps(adamw.init(&Sharding::none()).unwrap());
    let alone = ProcessGroups::single(0);
    let net = steps(config.init(&Sharding::none(), &alone).unwrap());
    assert_eq!(values(net.bias.val()), values(expected.bias.val()));
    // The gradient is a multiple of the matrix, so both steps have the same direction.
    let moved = (before.matrix.val() - net.matrix.val()).inner() / (2.0 * LR);
    let gram = values(moved.clone().matmul(moved.transpose()));
    for (i, found) in gram.iter().enumerate() {
        // The square of the scale, out / in.
        let expected = if i % 4 == 0 { 4.0 / 3.0 } else { 0.0 };
        assert!((found - expected).abs() < 1e-3, "{gram:?}");
    }
    let excluded = MuonConfig {
        excluded: vec!["mat".to_string()],
        ..config
    };
    let net = steps(excluded.init(&Sharding::none(), &alone).unwrap());
    assert_eq!(values(net.matrix.val()), values(expected.matrix.val()));
}

#[test]
fn a_gradient_that_is_not_finite_moves_nothing() {
    let device = Device::default().autodiff();
    let alone = ProcessGroups::single(0);
    let sharding = Sharding::none();
    for mut optimizer in [
        SgdConfig::default().init(&sharding).unwrap(),
        LionConfig::default().init(&sharding).unwrap(),
        muon().init(&sharding, &alone).unwrap(),
    ] {
        let net = Net::new(3, 4, 0, 1, &device);
        let before = [values(net.matrix.val()), values(net.bias.val())];
        let mut grads = GradientAccumulator::new(&net, &plan_of(3, 4, 0, 1), &sharding).unwrap();
        let loss = net.matrix.val().sum() * f32::NAN + net.bias.val().sum();
        grads.accumulate(&net, &mut loss.backward());
        grads.factor_on_gpu = Some(Tensor::from_floats([f32::NAN], &device.clone().inner()));
        let net = optimizer.step(LR, net, &grads).unwrap();
        assert_eq!([values(net.matrix.val()), values(net.bias.val())], before);
        let state = optimizer
            .state_tensors()
            .flat_map(|(_, _, state)| values(state));
        assert!(
            state.into_iter().all(|x| x == 0.0),
            "{} moved",
            optimizer.name()
        );
    }
}

/// The whole matrix is in the first rank's shard. `factor` is known only on the device, as on GPUs.
#[rstest]
fn a_rank_without_a_stretch_of_a_matrix_works_on_none(
    #[values(None, Some(0.5))] factor: Option<f32>,
) {
    let results = run_threads(2, GroupOptions::default(), |world| {
        let groups = ProcessGroups::new(&world, "dp2".parse().expect("a layout"))?;
        let device = Device::default().autodiff();
        let net = Net::new(3, 4, 0, 1, &device);
        let sharding = ShardingConfig::new(ShardingLevel::Optimizer).init(&net, &groups)?;
        let mut grads = GradientAccumulator::new(&net, &plan_of(3, 4, 0, 1), &sharding)?;
        let kept = grads.entries["matrix"].kept.len();
        grads.accumulate(&net, &mut net.matrix.val().square().sum().backward());
        grads.reduce()?;
        grads.factor_on_gpu = factor.map(|f| Tensor::from_floats([f], &device.clone().inner()));
        let mut optimizer = muon().init(&sharding, &ProcessGroups::single(0))?;
        let net = optimizer.step(LR, net, &grads)?;
        Ok::<_, crate::OptimError>((kept, values(net.matrix.val())))
    });
    let [first, second] = [0, 1].map(|rank| results[rank].as_ref().unwrap());
    assert_eq!((first.0.min(second.0), first.0 + second.0), (0, 12));
    assert_eq!(first.1, second.1);
    assert!(first.1.iter().all(|x| x.is_finite()));
}

#[rstest]
#[case(SgdConfig { momentum: 1.0, ..SgdConfig::default() }.init(&Sharding::none()), "momentum is 1; it must be at least 0")]
#[case(
    SgdConfig { momentum: 0.0, nesterov: true, ..SgdConfig::default() }.init(&Sharding::none()),
    "momentum is 0; it must be more than 0 with Nesterov momentum"
)]
#[case(LionConfig { beta_2: -0.1, ..LionConfig::default() }.init(&Sharding::none()), "beta_2 is -0.1")]
#[case(
    MuonConfig { num_ns_steps: 7, ..MuonConfig::default() }.init(&Sharding::none(), &ProcessGroups::single(0)),
    "num_ns_steps is 7; it must be a multiple of 5"
)]
#[case(
    MuonConfig { extra_scale: 0.0, ..MuonConfig::default() }.init(&Sharding::none(), &ProcessGroups::single(0)),
    "extra_scale is 0; it must be positive"
)]
fn impossible_configs_are_refused(
    #[case] made: Result<Optimizer, crate::OptimError>,
    #[case] message: &str,
) {
    let error = made.unwrap_err().to_string();
    assert!(error.contains(message), "{error}");
}
