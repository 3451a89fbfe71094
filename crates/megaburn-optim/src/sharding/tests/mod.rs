//! Experts together with dense parameters: every layout takes the same steps as a single rank that
//! holds everything.

mod fp8;
mod resumed;
mod scaled;
mod sent;
mod spoiled;

use std::{
    collections::BTreeMap,
    ops::Range,
    time::{SystemTime, UNIX_EPOCH},
};

use burn::tensor::{Device, FloatDType};
use megaburn_autograd::MainGrad;
use megaburn_collective::{GroupOptions, ProcessGroups, run_threads};
use megaburn_mesh::{Layout, ParamSpec, ShardPlan};
use rstest::rstest;

use super::*;
use crate::{
    accumulator::GradientAccumulator,
    error::OptimError,
    moment::Moment,
    optimizer::Optimizer,
    rule::{AdamWConfig, MuonConfig, MuonTpMode},
    testing::{
        cut,
        full_state::full_state,
        moe::{Moe, NUM_EXPERTS, Values, draw, experts_of, num_replicas, plan_of},
    },
};

const LEVELS: [ShardingLevel; 4] = [
    ShardingLevel::None,
    ShardingLevel::Optimizer,
    ShardingLevel::Gradients,
    ShardingLevel::Parameters,
];

const MICRO_BATCHES: usize = 3;

/// The range of a gradient that a rank keeps, and its values.
type Kept = (Range<usize>, Vec<f32>);

/// The results of a rank: per step, and after the last step.
struct Found {
    numbers: Vec<[f64; 3]>,
    grads: Vec<BTreeMap<String, Kept>>,
    params: Values,
    state: BTreeMap<(Moment, String), Vec<f32>>,
    num_sent: Vec<usize>,
}

/// The state of a rank between steps.
struct Rank {
    device: Device,
    plan: ShardPlan,
    net: Moe,
    layers: BTreeMap<String, MainGrad>,
    sharding: Sharding,
    optimizer: Optimizer,
    grads: GradientAccumulator,
}

impl Rank {
    /// Runs a backward pass with these gradients. Returns the number of buckets that were sent
    /// during it.
    fn micro_batch(&mut self, own: &Values, is_last: bool) -> Result<usize, OptimError> {
        let Self {
            device,
            net,
            layers,
            grads,
            ..
        } = self;
        grads.begin_micro_batch(is_last);
        grads.accumulate(net, &mut net.loss(own, layers, device).backward());
        let num_sent = grads
            .overlap
            .as_ref()
            .map_or(0, |overlap| overlap.num_started());
        grads.end_micro_batch()?;
        Ok(num_sent)
    }
}

/// The configuration of a run.
#[derive(Clone)]
struct Setup {
    layout: Layout,
    rule: &'static str,
    config: ShardingConfig,
    layers_sum: bool,
    offload: f64,
    /// Whether features are scaled after each step.
    scales: bool,
    seed: u64,
}

impl Setup {
    fn new(layout: &str, rule: &'static str, config: ShardingConfig, layers_sum: bool) -> Self {
        let seed = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap()
            .as_nanos() as u64;
        println!("seed {seed}");
        let layout = layout.parse().unwrap();
        let offload = 0.0;
        Self {
            layout,
            rule,
            config,
            layers_sum,
            offload,
            scales: false,
            seed,
        }
    }

    /// The same run on a single rank that holds everything.
    fn alone(&self) -> Self {
        let config = ShardingConfig::new(ShardingLevel::None);
        Self {
            config,
            layers_sum: false,
            offload: 0.0,
            ..self.clone()
        }
    }

    fn optimizer(&self, sharding: &Sharding, groups: &ProcessGroups) -> Optimizer {
        let muon = |tp_mode| {
            let config = MuonConfig {
                tp_mode,
                ..MuonConfig::default()
            };
            config.init(sharding, groups)
        };
        let optimizer = match self.rule {
            "adamw" => AdamWConfig::new().init(sharding),
            "muon" => muon(MuonTpMode::Duplicated),
            _ => muon(MuonTpMode::Distributed),
        };
        optimizer.unwrap()
    }

    /// The gradients of a micro-batch on a rank; for a single rank, their sum over all ranks.
    fn grads(&self, plan: &ShardPlan, groups: &ProcessGroups, at: (usize, usize)) -> Values {
        let is_all = groups.world.size() == 1;
        let grads = plan.iter().map(|(path, spec)| {
            let shard = &spec.shard;
            let of = |replica: usize| draw((self.seed, at, path, replica), shard.num_global());
            let replica = if spec.is_expert() {
                groups.edp.rank()
            } else {
                groups.dp_cp.rank()
            };
            if !is_all {
                return (path.to_string(), cut(shard, &of(replica)));
            }
            let mut sum = vec![0.0; shard.num_global()];
            for replica in 0..num_replicas(&self.layout, spec) {
                sum.iter_mut()
                    .zip(of(replica))
                    .for_each(|(sum, own)| *sum += own);
            }
            (path.to_string(), sum)
        });
        grads.collect()
    }

    fn start(&self, groups: &ProcessGroups) -> Result<Rank, OptimError> {
        let device = Device::default().autodiff();
        let plan = plan_of(groups);
        let whole = plan.iter().map(|(path, spec)| {
            (
                path.to_string(),
                draw((self.seed, path), spec.shard.num_global()),
            )
        });
        let net = Moe::new(&plan, &whole.collect(), &device);
        let mut config = self.config.clone().with_experts(experts_of(&plan));
        let mut layers = BTreeMap::new();
        if self.layers_sum {
            layers.extend(
                net.matrices()
                    .into_iter()
                    .map(|path| (path, MainGrad::default())),
            );
            config = config.with_direct(layers.keys().cloned());
        }
        let sharding = config.init(&net, groups)?;
        sharding.attach(&layers, true);
        let mut optimizer = self
            .optimizer(&sharding, groups)
            .with_cpu_offload(self.offload)?;
        let net = optimizer.cast_params(net, FloatDType::F32);
        let grads =
            GradientAccumulator::new(&net, &plan, &sharding)?.with_main_grads(layers.clone());
        Ok(Rank {
            device,
            plan,
            net,
            layers,
            sharding,
            optimizer,
            grads,
        })
    }

    fn train(&self, groups: &ProcessGroups) -> Result<Found, OptimError> {
        let mut rank = self.start(groups)?;
        let mut numbers = Vec::new();
        let mut all = Vec::new();
        let mut num_sent = Vec::new();
        for step in 0..2 {
            rank.grads.reset();
            for micro in 0..MICRO_BATCHES {
                let own = self.grads(&rank.plan, groups, (step, micro));
                num_sent.push(rank.micro_batch(&own, micro + 1 == MICRO_BATCHES)?);
            }
            let Rank {
                plan,
                net,
                sharding,
                optimizer,
                grads,
                ..
            } = &mut rank;
            grads.reduce()?;
            grads.scale(0.25);
            let kept = |path: &str| sharding.kept(path, grads.entries[path].num_elements());
            let values = |path: &str| crate::testing::values(grads.get(path).unwrap());
            let paths = grads.paths();
            all.push(
                paths
                    .map(|path| (path.to_string(), (kept(path), values(path))))
                    .collect(),
            );
            let norm = grads.norm()?;
            let zeros = grads.num_zeros()?.read()?;
            assert!((grads.norm_on(true)?.read()? / norm.read()? - 1.0).abs() < 1e-6);
            numbers.push([norm.read()?, zeros, grads.params_norm(net)?.read()?]);
            grads.clip(&norm, 1.0);
            *net = optimizer.step(1e-2, net.clone(), grads)?;
            if self.scales {
                let factors = scaled::factors(plan);
                *net = optimizer.scale_features(net.clone(), &factors, grads)?;
            }
            sharding.settle();
        }
        assert_eq!(rank.optimizer.state.num_late_tensors, 0);
        let state = full_state(&rank.optimizer)?.into_iter();
        let moments = state.filter_map(|((moment, path), state)| Some(((moment?, path), state)));
        let state = moments.collect();
        let params = rank.sharding.whole(rank.net)?.values();
        Ok(Found {
            numbers,
            grads: all,
            params,
            state,
            num_sent,
        })
    }

    /// Checks that every rank's results are those of a single rank.
    fn check(&self) -> Vec<Found> {
        let one = self.alone().train(&ProcessGroups::single(0)).unwrap();
        let ranks = run_threads(self.layout.world_size(), GroupOptions::default(), |world| {
            let groups = ProcessGroups::new(&world, self.layout)?;
            let found = self.train(&groups)?;
            let plan = plan_of(&groups);
            let cut = |path: &str, whole: &[f32]| cut(&plan.get(path).unwrap().shard, whole);
            for (found, one) in found.grads.iter().zip(&one.grads) {
                assert_eq!(found.len(), plan.len());
                for (path, (kept, found)) in found {
                    assert_eq!(*found, cut(path, &one[path].1)[kept.clone()], "{path}");
                }
            }
            let is_near = |path: &str, found: &[f32], whole: &[f32]| {
                for (found, one) in found.iter().zip(cut(path, whole)) {
                    // AdamW rounds the same on every layout.
                    let most = if self.rule == "adamw" { 0.0 } else { 1e-5 };
                    assert!((found - one).abs() <= most, "{path}: {found} {one}");
                }
            };
            found
                .params
                .iter()
                .for_each(|(path, x)| is_near(path, x, &one.params[path]));
            assert_eq!(found.params.len(), plan.len());
            for (key, x) in &found.state {
                is_near(&key.1, x, &one.state[key]);
            }
            let kept = one
                .state
                .keys()
                .filter(|(_, path)| plan.get(path).is_some());
            assert!(found.state.keys().eq(kept));
            Ok::<_, OptimError>(found)
        });
        let ranks: Vec<Found> = ranks.into_iter().map(Result::unwrap).collect();
        for rank in &ranks {
            assert_eq!(rank.numbers, ranks[0].numbers);
            for ([norm, zeros, params], one) in rank.numbers.iter().zip(&one.numbers) {
                assert_eq!([*norm, *zeros], [one[0], one[1]]);
                assert!((params / one[2] - 1.0).abs() < 1e-6, "{params} {}", one[2]);
            }
        }
        ranks
    }
}

#[rstest]
fn every_layout_takes_the_steps_of_one_rank(
    #[values(
        "dp1",
        "dp2",
        "dp2-ep2",
        "dp4-ep2",
        "dp4-ep4",
        "cp2-ep2",
        "tp2-etp2",
        "tp2",
        "dp2-etp2",
        "cp2-dp2-ep2",
        "tp2-dp2-ep2-sp",
        "tp2-dp2-ep2-etp2-sp",
        "pp2-dp2-ep2",
        "tp2-pp2-dp2-ep4-sp"
    )]
    layout: &str,
    #[values("adamw", "muon", "muon, distributed")] rule: &'static str,
) {
    for level in LEVELS {
        for (bucket, layers_sum) in [
            (None, true),
            (Some(1), true),
            (Some(600), true),
            (None, false),
        ] {
            println!("{level:?} {bucket:?} {layers_sum}");
            let config = ShardingConfig::new(level).with_bucket(bucket);
            Setup::new(layout, rule, config, layers_sum).check();
        }
    }
}

#[rstest]
#[case("dp4-ep2", 2, [2, 2])]
#[case("dp4-ep2", 1, [1, 1])]
#[case("dp4", 2, [2, 2])]
#[case("dp4-ep4", 2, [2, 1])]
// Two does not divide the three ranks that hold an expert.
#[case("dp6-ep2", 2, [2, 1])]
#[case("dp8-ep2", 8, [8, 4])]
#[case("tp2-dp4-sp", 4, [4, 4])]
#[case("tp2-sp", 1, [1, 1])]
fn some_neighbours_share_and_the_others_have_copies(
    #[case] layout: &str,
    #[case] ranks: usize,
    #[case] expected: [usize; 2],
) {
    for level in LEVELS {
        let config = ShardingConfig::new(level)
            .with_ranks(Some(ranks))
            .with_bucket(Some(600));
        let setup = Setup::new(layout, "adamw", config, true);
        setup.check();
        let shared = run_threads(
            setup.layout.world_size(),
            GroupOptions::default(),
            |world| {
                let Rank { plan, sharding, .. } =
                    setup.start(&ProcessGroups::new(&world, setup.layout)?)?;
                let paths = ["blocks.0.norm".to_string(), experts_of(&plan).remove(0)];
                Ok::<_, OptimError>(paths.map(|path| sharding.num_shares(&path)))
            },
        );
        let expected = if level == ShardingLevel::None {
            [1, 1]
        } else {
            expected
        };
        shared
            .into_iter()
            .for_each(|found| assert_eq!(found.unwrap(), expected));
    }
}

#[rstest]
fn state_in_host_memory_comes_in_time(
    #[values("dp2-ep2", "dp4-ep2")] layout: &str,
    #[values("adamw", "muon")] rule: &'static str,
    #[values(0.4, 1.0)] offload: f64,
) {
    for level in LEVELS {
        let config = ShardingConfig::new(level).with_bucket(Some(600));
        Setup {
            offload,
            ..Setup::new(layout, rule, config, true)
        }
        .check();
    }
}
