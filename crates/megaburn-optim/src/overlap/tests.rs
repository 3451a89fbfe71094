use burn::tensor::Device;
use megaburn_collective::{GroupOptions, ProcessGroups, run_threads};
use megaburn_kernels::{LinearOptions, linear};
use megaburn_mesh::{Axis, Layout, ShardPlan, ShardSpec};
use rstest::rstest;

use super::*;
use crate::{
    accumulator::GradientAccumulator,
    error::OptimError,
    sharding::{ShardingConfig, ShardingLevel},
    testing::{Net, plan_of, values},
};

impl Overlap {
    /// The number of buckets that were sent in this backward pass.
    pub(crate) fn num_started(&self) -> usize {
        self.lock().started.len()
    }
}

/// How a micro-batch uses the weight.
type Use = fn(&Net, Tensor<2>, &MainGrad) -> Tensor<2>;

fn once(net: &Net, x: Tensor<2>, main_grad: &MainGrad) -> Tensor<2> {
    let options = LinearOptions {
        main_grad: Some(main_grad.clone()),
        ..Default::default()
    };
    linear(x, net.matrix.val(), Some(net.bias.val()), options)
}

fn twice(net: &Net, x: Tensor<2>, main_grad: &MainGrad) -> Tensor<2> {
    once(net, once(net, x, main_grad), main_grad)
}

fn beside_another(net: &Net, x: Tensor<2>, main_grad: &MainGrad) -> Tensor<2> {
    once(net, x.clone(), main_grad) + x.matmul(net.matrix.val())
}

/// Per rank, the gradients of one micro-batch per entry of `uses`, and the number of buckets that
/// were sent in the last backward pass.
fn gradients(
    level: ShardingLevel,
    begins: bool,
    uses: &[Use],
) -> Result<Vec<(Vec<f32>, usize)>, String> {
    let layout: Layout = "dp2".parse().unwrap();
    let ranks = run_threads(2, GroupOptions::default(), |world| {
        let groups = ProcessGroups::new(&world, layout)?;
        let device = Device::default().autodiff();
        let net = Net::new(6, 6, 0, 1, &device);
        let mut plan = ShardPlan::new();
        for (path, shape) in [("matrix", &[6, 6][..]), ("bias", &[6][..])] {
            let shard = ShardSpec::whole(shape, Axis::Tp, 0, 1);
            plan.insert(path, megaburn_mesh::ParamSpec { shard })
                .expect("new");
        }
        let main_grad = MainGrad::default();
        let direct = ["matrix".to_string()];
        let sharding = ShardingConfig::new(level)
            .with_direct(direct)
            .init(&net, &groups)?;
        let main_grads = BTreeMap::from([("matrix".to_string(), main_grad.clone())]);
        let mut grads =
            GradientAccumulator::new(&net, &plan, &sharding)?.with_main_grads(main_grads);
        let mut sent = 0;
        for (index, forward) in uses.iter().enumerate() {
            let x = Tensor::full([3, 6], (world.rank() + 1) as f32, &device);
            let loss = forward(&net, x.require_grad(), &main_grad).sum();
            if begins {
                grads.begin_micro_batch(index + 1 == uses.len());
            }
            grads.accumulate(&net, &mut loss.backward());
            sent = grads.overlap.as_ref().unwrap().num_started();
            grads.end_micro_batch()?;
        }
        grads.reduce()?;
        let both = ["matrix", "bias"].map(|path| values(grads.get(path).unwrap()));
        Ok::<_, OptimError>((both.concat(), sent))
    });
    ranks
        .into_iter()
        .collect::<Result<_, _>>()
        .map_err(|error| error.to_string())
}

#[rstest]
fn a_bucket_is_sent_by_the_backward_that_completes_it_and_the_sums_are_the_same(
    #[values(
        ShardingLevel::None,
        ShardingLevel::Optimizer,
        ShardingLevel::Gradients
    )]
    level: ShardingLevel,
) {
    let found = gradients(level, true, &[once, once, once]).unwrap();
    let without = gradients(level, false, &[once, once, once]).unwrap();
    for ((found, sent), (expected, none)) in found.iter().zip(&without) {
        assert_eq!((*sent, *none), (1, 0));
        assert_eq!(found, expected);
    }
    // The first backward pass of a run only counts gradients.
    let first = gradients(level, true, &[once]).unwrap();
    assert!(first.iter().all(|(_, sent)| *sent == 0));
}

/// Two stages that a rank has.
#[derive(burn::module::Module, Debug)]
struct Stages {
    first: Net,
    second: Net,
}

/// The gradients of both stages' matrices after the given backward passes of one stage each, and
/// the buckets that had been sent after each pass.
fn of_stages(
    level: ShardingLevel,
    begins: bool,
    backwards: &[(usize, bool)],
) -> Vec<(Vec<f32>, Vec<Vec<usize>>)> {
    let paths = ["first.matrix", "second.matrix"];
    let ranks = run_threads(2, GroupOptions::default(), |world| {
        let groups = ProcessGroups::new(&world, "dp2".parse().expect("a layout"))?;
        let device = Device::default().autodiff();
        let [first, second] = [6, 4].map(|rows| Net::new(rows, 6, 0, 1, &device));
        let net = Stages { first, second };
        let mut plan = ShardPlan::new();
        for (stage, rows) in [("first", 6), ("second", 4)] {
            for (path, spec) in plan_of(rows, 6, 0, 1).iter() {
                plan.insert(format!("{stage}.{path}"), spec.clone())
                    .expect("new");
            }
        }
        let weights: BTreeMap<_, _> = paths
            .map(|path| (path.to_string(), MainGrad::default()))
            .into();
        let chunks = plan.iter().map(|(path, _)| {
            let chunk = usize::from(path.starts_with("second"));
            (path.to_string(), chunk)
        });
        let config = ShardingConfig::new(level).with_chunks(chunks);
        let sharding = config
            .with_direct(paths.map(String::from))
            .init(&net, &groups)?;
        let slots = sharding.buckets().iter();
        let slots = slots.map(|b| b.slots.iter().map(|slot| slot.path.as_str()).collect());
        let expected = [
            ["second.matrix"],
            ["first.matrix"],
            ["second.bias"],
            ["first.bias"],
        ];
        assert_eq!(slots.collect::<Vec<Vec<_>>>(), expected);
        let mut grads =
            GradientAccumulator::new(&net, &plan, &sharding)?.with_main_grads(weights.clone());
        let mut sent = Vec::new();
        for (at, (stage, is_last)) in backwards.iter().enumerate() {
            let (of, rows) = if *stage == 0 {
                (&net.first, 6)
            } else {
                (&net.second, 4)
            };
            let x = Tensor::full([3, rows], (world.rank() + at + 1) as f32, &device);
            let loss = once(of, x.require_grad(), &weights[paths[*stage]]).sum();
            if begins {
                grads.begin_micro_batch(*is_last);
            }
            grads.accumulate(&net, &mut loss.backward());
            sent.push(
                grads
                    .overlap
                    .as_ref()
                    .expect("others have copies")
                    .lock()
                    .started
                    .clone(),
            );
            grads.end_micro_batch()?;
        }
        grads.reduce()?;
        let all = plan
            .iter()
            .map(|(path, _)| values(grads.get(path).expect("it is trained")));
        Ok::<_, OptimError>((all.collect::<Vec<_>>().concat(), sent))
    });
    ranks.into_iter().map(Result::unwrap).collect()
}

#[test]
fn the_buckets_of_a_stage_are_sent_in_its_own_backward() {
    // The first backward pass of each stage only counts gradients.
    let backwards = [
        (1, false),
        (0, false),
        (0, false),
        (1, false),
        (0, true),
        (1, false),
        (1, true),
    ];
    let shared = [vec![], vec![], vec![1], vec![0], vec![1], vec![0], vec![0]];
    let summed = [vec![], vec![], vec![], vec![], vec![1], vec![1], vec![1, 0]];
    for (level, expected) in [
        (ShardingLevel::None, &summed),
        (ShardingLevel::Optimizer, &summed),
        (ShardingLevel::Gradients, &shared),
        (ShardingLevel::Parameters, &shared),
    ] {
        // No layers are attached, so parameters are not gathered on read.
        let found = of_stages(level, true, &backwards);
        let without = of_stages(level, false, &backwards);
        for ((found, sent), (expected_grads, none)) in found.iter().zip(&without) {
            assert_eq!(sent, expected, "{level:?}");
            assert!(none.iter().all(Vec::is_empty));
            assert_eq!(found, expected_grads, "{level:?}");
        }
    }
}

#[test]
fn a_weight_that_is_used_twice_is_waited_for_twice() {
    let found = gradients(ShardingLevel::Optimizer, true, &[twice, twice]).unwrap();
    assert!(found.iter().all(|(_, sent)| *sent == 1));
}

#[test]
fn a_weight_with_other_gradients_is_sent_at_the_end() {
    let uses: [Use; 2] = [beside_another, beside_another];
    let found = gradients(ShardingLevel::None, true, &uses).unwrap();
    let expected = gradients(ShardingLevel::None, false, &uses).unwrap();
    assert!(found.iter().all(|(_, sent)| *sent == 0));
    assert_eq!(found, expected);
}

#[test]
fn a_gradient_behind_the_sum_is_refused() {
    let error = gradients(ShardingLevel::None, true, &[once, twice]).unwrap_err();
    assert!(
        error.contains("`matrix` got more gradients in this micro-batch"),
        "{error}"
    );
}

#[test]
fn a_micro_batch_that_was_not_ended_is_summed_at_the_end() {
    let layout: Layout = "dp2".parse().unwrap();
    let ranks = run_threads(2, GroupOptions::default(), |world| {
        let groups = ProcessGroups::new(&world, layout)?;
        let net = Net::new(3, 6, 0, 1, &Device::default().autodiff());
        let config = ShardingConfig::new(ShardingLevel::Gradients);
        let sharding = config.init(&net, &groups)?;
        let mut grads = GradientAccumulator::new(&net, &plan_of(3, 6, 0, 1), &sharding)?;
        let loss = net.matrix.val().sum() + net.bias.val().sum();
        grads.accumulate(&net, &mut loss.backward());
        grads.reduce()?;
        grads.norm()?.read()
    });
    let expected = (4.0 * (18.0 + 6.0f64)).sqrt();
    ranks
        .into_iter()
        .for_each(|norm| assert!((norm.unwrap() - expected).abs() < 1e-12));
}
