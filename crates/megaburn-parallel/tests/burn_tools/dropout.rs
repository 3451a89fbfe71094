//! Burn's dropout in a model that a plan splits.

use burn::{
    module::Module,
    nn::{Dropout, DropoutConfig, LinearConfig},
    prelude::Device,
    tensor::Tensor,
};
use megaburn_collective::{Group, GroupOptions, run_threads};
use megaburn_parallel::{
    ParallelError, ParallelLinear, ParallelPlan, ReplicatedDropout, Sharded, parallelize,
};

#[derive(Module, Sharded, Debug)]
struct Dropped {
    up: ParallelLinear,
    down: ParallelLinear,
    #[sharded(skip)]
    between: Dropout,
    after: ReplicatedDropout,
}

#[test]
fn ranks_drop_the_same_elements_of_the_same_activations() {
    let device = Device::flex().autodiff();
    let net = || {
        let linear = |from, to| LinearConfig::new(from, to).init(&device).into();
        Dropped {
            up: linear(4, 8),
            down: linear(8, 4),
            between: DropoutConfig::new(0.5).init(),
            after: DropoutConfig::new(0.5).init().into(),
        }
    };
    let plan = ParallelPlan::new().column("up").row("down");
    let dropped = |ranks| {
        let found = run_threads(ranks, GroupOptions::default(), |group| {
            let net = parallelize(net(), &plan, &group)?;
            let x = Tensor::<2>::ones([6, 5], &device);
            let calls = [0; 2].map(|_| net.after.forward(x.clone()).into_data());
            // Neither after training nor frozen it drops anything.
            let frozen = net.after.clone().freeze().forward(x.clone());
            assert_eq!(frozen.into_data(), x.to_data());
            let valid = net.valid().after.forward(x.clone().inner());
            assert_eq!(valid.into_data(), x.into_data());
            Ok::<_, ParallelError>(calls)
        });
        found.into_iter().map(Result::unwrap).collect::<Vec<_>>()
    };
    let [first, second] = dropped(1).remove(0);
    assert_ne!(first, second);
    let values: Vec<f32> = first.iter().collect();
    assert!(values.iter().all(|x| *x == 0.0 || *x == 2.0), "{values:?}");
    for of_rank in dropped(4) {
        assert_eq!(of_rank, [first.clone(), second.clone()]);
    }
}

#[derive(Module, Sharded, Debug)]
struct PlainDropout {
    up: ParallelLinear,
    after: Dropout,
}

#[test]
fn dropout_that_differs_between_ranks_is_refused() {
    let device = Device::flex();
    let of = |prob| {
        let net = PlainDropout {
            up: LinearConfig::new(4, 4).init(&device).into(),
            after: DropoutConfig::new(prob).init(),
        };
        let plan = ParallelPlan::new().column_gathered("up");
        parallelize(net, &plan, &Group::single(0)).map(drop)
    };
    of(0.0).unwrap();
    let error = of(0.1).unwrap_err().to_string();
    assert!(
        error.contains("`after`: ranks would drop different elements"),
        "{error}"
    );
}
