//! Burn's dropout in a model that a plan splits.

use burn::{
    module::{Module, ModuleDisplay},
    nn::{Dropout, DropoutConfig, LinearConfig, attention::MultiHeadAttentionConfig},
    prelude::Device,
    tensor::Tensor,
};
use megaburn_collective::{Group, GroupOptions, run_threads};
use megaburn_parallel::{
    ParallelError, ParallelLinear, ParallelLinearConfig, ParallelMultiHeadAttention, ParallelPlan,
    ReplicatedDropout, Sharded, parallelize, shard_plan,
};
use rstest::rstest;

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

#[derive(Module, Sharded, Debug)]
struct Built<D: Module> {
    up: ParallelLinear,
    after: D,
}

impl<D: Module + ModuleDisplay + Sharded> Built<D> {
    /// The error of the plan, if there is one, of layers that are built with a group.
    fn refused(group: &Group, after: D) -> Result<Option<String>, ParallelError> {
        let up = ParallelLinearConfig::column(4, 4).with_name("up");
        let up = up.init(group, &Device::flex())?;
        let plan = shard_plan(&Self { up, after });
        Ok(plan.err().map(|error| error.to_string()))
    }
}

#[rstest]
fn plans_refuse_dropout_that_differs_between_ranks(#[values(1, 2)] ranks: usize) {
    let found = run_threads(ranks, GroupOptions::default(), |group| {
        let dropout = |prob| DropoutConfig::new(prob).init();
        let replicated = |prob| ReplicatedDropout::from(dropout(prob));
        for none in [
            Built::refused(&group, dropout(0.0))?,
            Built::refused(&group, replicated(0.0))?,
        ] {
            assert_eq!(none, None);
        }
        Ok::<_, ParallelError>([
            Built::refused(&group, dropout(0.1))?,
            Built::refused(&group, replicated(0.1))?,
        ])
    });
    for found in found {
        let errors = found.unwrap();
        assert!(errors.iter().all(|error| error.is_some() == (ranks > 1)));
        for error in errors.into_iter().flatten() {
            let expected = "dropout `after`: the 2 ranks that hold the same activations would drop";
            assert!(error.contains(expected), "{error}");
            assert!(error.contains("`ParallelDropout`"), "{error}");
        }
    }
}

#[derive(Module, Sharded, Debug)]
struct Attentions {
    first: ParallelMultiHeadAttention,
    second: ParallelMultiHeadAttention,
}

#[test]
fn attentions_that_no_pattern_splits_drop_nothing() {
    let device = Device::flex();
    let split = |second: f64, plan: ParallelPlan| {
        let attention = |prob| {
            let config = MultiHeadAttentionConfig::new(8, 4).with_dropout(prob);
            config.init(&device).into()
        };
        let found = run_threads(2, GroupOptions::default(), |group| {
            let net = Attentions {
                first: attention(0.1),
                second: attention(second),
            };
            let result = parallelize(net, &plan, &group);
            Ok::<_, ParallelError>(result.err().map(|error| error.to_string()))
        });
        let found = found.into_iter().map(Result::unwrap);
        found.collect::<Option<Vec<_>>>()
    };
    let of_first = || ParallelPlan::new().attention("first", 4);
    assert_eq!(split(0.1, of_first().attention("second", 4)), None);
    assert_eq!(split(0.0, of_first()), None);
    for error in split(0.1, of_first()).unwrap() {
        assert!(
            error.contains("dropout `second.dropout`: the 2 ranks"),
            "{error}"
        );
        assert!(error.contains("`ParallelPlan::attention`"), "{error}");
    }
}
