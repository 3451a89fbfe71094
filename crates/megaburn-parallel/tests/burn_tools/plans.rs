//! Plans that do not fit a model are refused by name.

use burn::{
    module::{Module, Param},
    nn::{LayerNorm, LayerNormConfig, LinearConfig},
    prelude::Device,
    tensor::{Tensor, activation::silu},
};
use megaburn_collective::{Group, GroupOptions, GroupShards, run_threads};
use megaburn_mesh::Axis;
use megaburn_parallel::{
    Norm, NormConfig, ParallelError, ParallelLinear, ParallelLinearConfig, ParallelPlan, Sharded,
    parallelize, shard_plan,
};
use rstest::rstest;

use crate::parallelize::{plain, plan, split};

/// The error of a plan on ranks.
fn refused(ranks: usize, plan: &ParallelPlan) -> String {
    let device = Device::flex();
    let found = run_threads(ranks, GroupOptions::default(), |group| {
        parallelize(split::Net::from(plain::Net::new(&device)), plan, &group).map(drop)
    });
    let mut errors: Vec<_> = found
        .into_iter()
        .map(|rank| rank.unwrap_err().to_string())
        .collect();
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    errors.remove(0)
}

#[rstest]
#[case::nothing(
    ParallelPlan::new().column("blocks.*.mlp.up").row("blocks.*.down"),
    "`blocks.*.mlp.up`: the pattern matches no layer; the module's are `embedding`, \
    `blocks.0.attention.query`"
)]
#[case::twice(
    ParallelPlan::new().column("blocks.*.up").row("blocks.*.down").column("blocks.1.*p"),
    "`blocks.1.up`: two patterns match it, `blocks.*.up` and `blocks.1.*p`"
)]
#[case::no_row(
    ParallelPlan::new().column("blocks.*.up"),
    "`blocks.0.up`: a column split leaves its output split, and `blocks.0` has no row split"
)]
#[case::no_column(
    ParallelPlan::new().row("head"),
    "`head`: a row split takes a split input, and the module has no column split"
)]
#[case::plain_layer(
    ParallelPlan::new().column("blocks.*.norm"),
    "`blocks.0.norm`: `LayerNorm` is a plain Burn layer"
)]
#[case::embedding(
    ParallelPlan::new().row("embedding"),
    "`embedding`: this is an embedding, whose rows `vocabulary` splits"
)]
#[case::linear(
    ParallelPlan::new().vocabulary("head"),
    "`head`: `vocabulary` splits an embedding"
)]
#[case::features(
    ParallelPlan::new().column_gathered("bottleneck"),
    "`bottleneck`: 5 output features are not divisible over 4 ranks"
)]
#[case::heads(
    ParallelPlan::new().column("blocks.*.attention.query").heads(2).row("blocks.*.attention.output")
        .column("blocks.*.attention.{key,value}").shared_heads(2),
    "`blocks.0.attention.query`: 2 heads are not divisible over 4 ranks"
)]
#[case::no_heads(
    ParallelPlan::new().column("blocks.*.attention.query").heads(5).row("blocks.*.attention.output")
        .column("blocks.*.attention.{key,value}").shared_heads(2),
    "`blocks.0.attention.query`: its 12 split features are no 5 heads of equal size"
)]
#[case::shared_heads(
    ParallelPlan::new().column("blocks.*.attention.key").shared_heads(3)
        .column("blocks.*.attention.{query,value}").row("blocks.*.attention.output"),
    "`blocks.0.attention.key`: a part of 3 units of 2 cannot be sharded over 4 tp ranks"
)]
#[case::between_a_column_and_a_row(
    ParallelPlan::new().column("blocks.*.attention.{query,value}").row("blocks.*.attention.output"),
    "`blocks.0.attention.key`: no pattern matches it, and `blocks.0.attention` has a column split and a row \
    split"
)]
#[case::heads_of_a_whole_layer(
    ParallelPlan::new().whole("bottleneck").heads(5),
    "`bottleneck`: a layer that is not split has no split heads"
)]
#[case::gathered_heads(
    ParallelPlan::new().column_gathered("head").heads(4),
    "`head`: gathered outputs have no heads"
)]
#[case::braces(
    ParallelPlan::new().column("blocks.{0.up"),
    "the braces of the pattern do not pair"
)]
fn wrong_plans_are_refused(#[case] plan: ParallelPlan, #[case] expected: &str) {
    let error = refused(4, &plan);
    assert!(error.contains(expected), "{error}");
}

#[test]
fn a_split_module_is_not_split_again() {
    let device = Device::flex();
    let found = run_threads(2, GroupOptions::default(), |group| {
        let net = split::Net::from(plain::Net::new(&device));
        let net = parallelize(net, &plan(), &group)?;
        Ok::<_, ParallelError>(parallelize(net, &plan(), &group).unwrap_err().to_string())
    });
    for error in found {
        let error = error.unwrap();
        assert!(
            error.contains("`embedding`: it is split over 2 ranks already"),
            "{error}"
        );
    }
}

#[derive(Module, Sharded, Debug)]
struct WithNorm {
    norm: Norm,
    up: ParallelLinear,
}

#[test]
fn layers_that_need_a_group_are_refused() {
    let group = Group::single(0);
    let device = Device::flex();
    let net = WithNorm {
        norm: NormConfig::rms(4).init(&group, &device),
        up: ParallelLinearConfig::new(4, 4)
            .init(&group, &device)
            .unwrap(),
    };
    let error = parallelize(net, &ParallelPlan::new().column_gathered("up"), &group);
    let error = error.unwrap_err().to_string();
    let expected = "parallelize `norm`: a `Norm` is built with the group that splits it";
    assert!(error.contains(expected), "{error}");
}

#[derive(Module, Sharded, Debug)]
struct WithGroup {
    #[sharded(replicated = group)]
    norm: LayerNorm,
    up: ParallelLinear,
    #[module(skip)]
    group: Group,
}

#[test]
fn the_group_of_a_field_becomes_that_of_the_layers() {
    let device = Device::flex();
    let found = run_threads(2, GroupOptions::default(), |group| {
        let net = WithGroup {
            norm: LayerNormConfig::new(4).init(&device),
            up: LinearConfig::new(4, 4).init(&device).into(),
            group: Group::single(0),
        };
        let net = parallelize(net, &ParallelPlan::new().column_gathered("up"), &group)?;
        // Every parameter is held once, or as a copy of the two ranks.
        GroupShards::new(&shard_plan(&net)?, &group).unwrap();
        Ok::<_, ParallelError>(net.group.size())
    });
    assert!(found.into_iter().all(|size| size.unwrap() == 2));
}

/// A gated unit that is a module of its own, as Burn's `SwiGlu` is.
#[derive(Module, Sharded, Debug)]
struct Unit {
    gate: ParallelLinear,
    up: ParallelLinear,
}

#[derive(Module, Sharded, Debug)]
struct Gated {
    unit: Unit,
    down: ParallelLinear,
    /// A parameter that is a field itself.
    #[sharded(replicated)]
    scale: Param<Tensor<1>>,
}

impl Gated {
    fn new() -> Self {
        let device = Device::flex();
        let linear = |from, to| LinearConfig::new(from, to).init(&device).into();
        Self {
            unit: Unit {
                gate: linear(3, 8),
                up: linear(3, 8),
            },
            down: linear(8, 3),
            scale: Param::from_tensor(Tensor::from_floats([0.5, 1.0, 2.0], &device)),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let gate = silu(self.unit.gate.forward(x.clone()));
        let y = self.down.forward(gate * self.unit.up.forward(x));
        y * self.scale.val().unsqueeze()
    }
}

#[test]
fn a_row_pairs_with_the_columns_of_a_module_inside() {
    let net = Gated::new();
    let x = Tensor::<2>::from_floats([[0.1, -0.4, 0.9], [1.2, 0.3, -0.5]], &Device::flex());
    let expected = net.forward(x.clone()).into_data();
    let plan = ParallelPlan::new().column("unit.{gate,up}").row("down");
    for found in run_threads(4, GroupOptions::default(), |group| {
        let net = parallelize(net.clone(), &plan, &group)?;
        let scale = shard_plan(&net)?.get("scale").unwrap().shard.clone();
        assert_eq!((scale.global_shape, scale.pieces[0].replicas), (vec![3], 4));
        Ok::<_, ParallelError>(net.forward(x.clone()).into_data())
    }) {
        let found = found.unwrap();
        found.assert_approx_eq::<f32>(&expected, Default::default());
    }
}

#[rstest]
#[case::no_row(
    ParallelPlan::new().column("unit.{gate,up}"),
    "`unit.gate`: a column split leaves its output split, and `unit` has no row split"
)]
#[case::no_column(
    ParallelPlan::new().row("down"),
    "`down`: a row split takes a split input, and the module has no column split"
)]
#[case::half_of_the_unit(
    ParallelPlan::new().column("unit.up").row("down"),
    "`unit.gate`: no pattern matches it, and the module has a column split and a row split"
)]
fn half_of_a_pair_with_a_module_inside_is_refused(
    #[case] plan: ParallelPlan,
    #[case] expected: &str,
) {
    let error = parallelize(Gated::new(), &plan, &Group::single(0));
    let error = error.unwrap_err().to_string();
    assert!(error.contains(expected), "{error}");
}

/// A dense layer and one of an expert, which more ranks split.
#[derive(Module, Sharded, Debug)]
struct WithExpert {
    dense: ParallelLinear,
    expert: ParallelLinear,
    #[sharded(replicated)]
    norm: LayerNorm,
}

#[test]
fn copies_are_held_by_the_group_of_dense_layers() {
    let device = Device::flex();
    let found = run_threads(4, GroupOptions::default(), |etp| {
        let first = etp.rank() / 2 * 2;
        let tp = etp.subgroup("tp", &[first, first + 1]).unwrap();
        let column = |name| ParallelLinearConfig::column(4, 8).with_name(name);
        let expert = column("expert").with_axis(Axis::Etp);
        let net = WithExpert {
            dense: column("dense").init(&tp, &device)?,
            expert: expert.init(&etp, &device)?,
            norm: LayerNormConfig::new(4).init(&device),
        };
        let gamma = shard_plan(&net)?.get("norm.gamma").unwrap().shard.clone();
        Ok::<_, ParallelError>((gamma.axis, gamma.pieces[0].replicas))
    });
    assert!(
        found
            .into_iter()
            .all(|copies| copies.unwrap() == (Axis::Tp, 2))
    );
}
