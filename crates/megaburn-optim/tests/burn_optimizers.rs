//! Burn's optimizers on shards against the same optimizers on the full module.

use burn::{
    grad_clipping::GradientClipping,
    module::{Module, ModuleMapper, ModuleVisitor, Param, ParamGroup},
    nn::{LayerNorm, LayerNormConfig},
    optim::{
        AdaGradConfig, AdafactorConfig, AdamConfig, AdamWConfig, AdanConfig, GradientsParams,
        LBFGSConfig, LambConfig, LineSearchFn, LionConfig, ModuleOptimizer, MuonConfig,
        RmsPropConfig, SgdConfig, decay::WeightDecayConfig, momentum::MomentumConfig,
    },
    prelude::{Device, Int},
    tensor::{FloatDType, Tensor, activation::gelu},
};
use megaburn_collective::{Group, GroupOptions, GroupShards, run_threads};
use megaburn_optim::{ShardedOptimizer, lbfgs_step};
use megaburn_parallel::{
    ParallelError, ParallelLinear, ParallelLinearConfig, Sharded, VocabParallelEmbedding,
    VocabParallelEmbeddingConfig, lazy_params, shard_plan,
};
use rstest::rstest;

/// A column split, a row split, a split vocabulary, and a norm of which all ranks have copies.
#[derive(Module, Sharded, Debug)]
struct Net {
    embedding: VocabParallelEmbedding,
    #[sharded(replicated = group)]
    norm: LayerNorm,
    up: ParallelLinear,
    down: ParallelLinear,
    #[module(skip)]
    group: Group,
}

/// Tokens of the vocabulary, features, and hidden features.
type Sizes = [usize; 3];

impl Net {
    fn new([vocabulary, d_model, hidden]: Sizes, group: &Group) -> Result<Self, ParallelError> {
        let device = Device::flex().autodiff();
        let embedding = VocabParallelEmbeddingConfig::new(vocabulary, d_model)
            .with_pad_multiple(1)
            .with_initializer(burn::nn::Initializer::Normal {
                mean: 0.0,
                std: 1.0,
            })
            .with_name("embedding");
        let up = ParallelLinearConfig::column(d_model, hidden).with_name("up");
        let down = ParallelLinearConfig::row(hidden, d_model).with_name("down");
        Ok(Self {
            embedding: embedding.init(group, &device)?,
            norm: LayerNormConfig::new(d_model).init(&device),
            up: up.init(group, &device)?,
            down: down.init(group, &device)?,
            group: group.clone(),
        })
    }

    fn loss(&self) -> Tensor<1> {
        let device = Device::flex().autodiff();
        let tokens = self.embedding.n_embedding() as i64;
        let ids = Tensor::<1, Int>::arange(0..6, &device).mul_scalar(5);
        let ids = ids.remainder_scalar(tokens).reshape([3, 2]);
        let x = self.norm.forward(self.embedding.forward(ids));
        let y = self.down.forward(gelu(self.up.forward(x)));
        let [seq, batch, d_model] = y.dims();
        let wanted = Tensor::<1, Int>::arange(0..(seq * batch * d_model) as i64, &device);
        let wanted = wanted.float().sin().reshape([seq, batch, d_model]);
        (y - wanted).square().mean()
    }

    fn grads(&self) -> GradientsParams {
        GradientsParams::from_grads(self.loss().backward(), self)
    }

    /// The values of the full parameters, one after the other.
    fn full(&self) -> Vec<f32> {
        let plan = shard_plan(self).unwrap();
        let shards = GroupShards::new(&plan, &self.group).unwrap();
        let mut values = Vec::new();
        for param in lazy_params(self) {
            let path = param.path.clone();
            let shards = shards.get(&path).unwrap();
            let local = shards.own().local_shape();
            let flat = param.flat();
            let full = match local[..] {
                [rows, columns] => shards
                    .gather(flat.reshape([rows, columns]))
                    .unwrap()
                    .flatten(0, 1),
                _ => shards.gather(flat).unwrap(),
            };
            values.extend(full.into_data().iter::<f32>());
        }
        values
    }
}

fn sgd() -> SgdConfig {
    SgdConfig::new().with_weight_decay(Some(WeightDecayConfig::new(0.01)))
}

fn momentum() -> SgdConfig {
    sgd().with_momentum(Some(MomentumConfig::new()))
}

/// Burn's optimizer as `ShardedOptimizer` runs it, and as Burn does.
fn optimizers(name: &str) -> (ShardedOptimizer, ModuleOptimizer) {
    macro_rules! both {
        ($config:expr) => {
            (
                ShardedOptimizer::new($config.build()),
                ModuleOptimizer::from($config.build()),
            )
        };
    }
    match name {
        "sgd" => both!(sgd()),
        "momentum" => both!(momentum()),
        "adam" => both!(AdamConfig::new()),
        "adamw" => both!(AdamWConfig::new().with_weight_decay(0.1)),
        "adan" => both!(AdanConfig::new()),
        "adagrad" => both!(AdaGradConfig::new()),
        "rmsprop" => both!(RmsPropConfig::new().with_centered(true)),
        "lion" => both!(LionConfig::new()),
        "lamb" => both!(LambConfig::new().with_weight_decay(0.01)),
        "adafactor" => both!(AdafactorConfig::new()),
        // It takes matrices only.
        "muon" => {
            let (sharded, plain) = both!(AdamWConfig::new());
            let matrices = ParamGroup::from_predicate("weight");
            let is_matrix = |path: &str| path.contains("weight");
            (
                sharded.with_group(is_matrix, MuonConfig::new().build()),
                plain.with_group(matrices, MuonConfig::new().build(), None),
            )
        }
        _ => panic!("no optimizer {name}"),
    }
}

/// The full parameters after ten steps on a number of ranks, with Burn's optimizer as it is if
/// `is_plain`.
fn trained(
    name: &str,
    (sizes, ranks): (Sizes, usize),
    clipping: Option<GradientClipping>,
    is_plain: bool,
) -> Vec<f32> {
    let found = run_threads(ranks, GroupOptions::default(), |group| {
        let mut net = Net::new(sizes, &group)?;
        let (sharded, plain) = optimizers(name);
        let mut optimizer = match (is_plain, clipping.clone()) {
            (true, None) => plain,
            (true, Some(clipping)) => plain.with_grad_clipping(clipping),
            (false, None) => sharded.init(&shard_plan(&net)?, &group).unwrap(),
            (false, Some(clipping)) => {
                let sharded = sharded.with_grad_clipping(clipping);
                sharded.init(&shard_plan(&net)?, &group).unwrap()
            }
        };
        for _ in 0..10 {
            let grads = net.grads();
            net = optimizer.step(0.01, net, grads);
        }
        Ok::<_, ParallelError>(net.full())
    });
    let mut found: Vec<_> = found.into_iter().map(Result::unwrap).collect();
    assert!(found.iter().all(|values| *values == found[0]));
    found.remove(0)
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, f32::max)
}

const SIZES: [Sizes; 2] = [[13, 5, 8], [16, 6, 12]];

#[rstest]
#[case::sgd("sgd")]
#[case::momentum("momentum")]
#[case::adam("adam")]
#[case::adamw("adamw")]
#[case::adan("adan")]
#[case::adagrad("adagrad")]
#[case::rmsprop("rmsprop")]
#[case::lion("lion")]
#[case::lamb("lamb")]
#[case::muon("muon")]
#[case::adafactor("adafactor")]
fn an_optimizer_of_burns_updates_shards_as_one_rank_does(#[case] name: &str) {
    for sizes in SIZES {
        let expected = trained(name, (sizes, 1), None, true);
        for ranks in [1, 2, 4] {
            let found = trained(name, (sizes, ranks), None, false);
            let distance = distance(&found, &expected);
            assert!(distance < 2e-5, "{sizes:?} on {ranks} ranks: {distance}");
        }
    }
}

#[rstest]
#[case::lamb("lamb", None)]
#[case::muon("muon", None)]
#[case::adafactor("adafactor", None)]
#[case::clipped("sgd", Some(GradientClipping::Norm(0.01)))]
fn without_it_shards_diverge_from_one_rank(
    #[case] name: &str,
    #[case] clipping: Option<GradientClipping>,
) {
    let of = |ranks| trained(name, (SIZES[0], ranks), clipping.clone(), true);
    let distance = distance(&of(2), &of(1));
    assert!(distance > 1e-4, "{distance}");
}

#[rstest]
#[case::norm("sgd", GradientClipping::Norm(0.01))]
#[case::norm_of_full("lamb", GradientClipping::Norm(0.01))]
#[case::value("adam", GradientClipping::Value(0.001))]
fn gradients_are_clipped_as_those_of_full_parameters(
    #[case] name: &str,
    #[case] clipping: GradientClipping,
) {
    for sizes in SIZES {
        let expected = trained(name, (sizes, 1), Some(clipping.clone()), true);
        assert!(distance(&expected, &trained(name, (sizes, 1), None, true)) > 1e-4);
        for ranks in [2, 4] {
            let found = trained(name, (sizes, ranks), Some(clipping.clone()), false);
            let distance = distance(&found, &expected);
            assert!(distance < 2e-5, "{sizes:?} on {ranks} ranks: {distance}");
        }
    }
}

#[rstest]
#[case::fixed_step(None)]
#[case::line_search(Some(LineSearchFn::StrongWolfe))]
fn l_bfgs_on_shards_is_that_of_one_rank(#[case] search: Option<LineSearchFn>) {
    let trained = |ranks| {
        let found = run_threads(ranks, GroupOptions::default(), |group| {
            let mut net = Net::new(SIZES[0], &group)?;
            let plan = shard_plan(&net)?;
            let mut config = LBFGSConfig::new().with_max_iter(4);
            if let Some(search) = search {
                config = config.with_line_search_fn(search);
            }
            let mut optimizer = config.init();
            let mut losses = Vec::new();
            for _ in 0..3 {
                let closure = |net: Net| (f64::from(net.loss().into_scalar::<f32>()), net.grads());
                let (new, loss) = match ranks {
                    // Burn's own step on the full module.
                    1 => optimizer.step(0.1, net, closure),
                    _ => lbfgs_step(&mut optimizer, 0.1, net, (&plan, &group), closure).unwrap(),
                };
                net = new;
                losses.push(loss);
            }
            Ok::<_, ParallelError>((net.full(), losses))
        });
        let mut found: Vec<_> = found.into_iter().map(Result::unwrap).collect();
        found.remove(0)
    };
    let (expected, losses) = trained(1);
    assert!(losses[2] < losses[0], "{losses:?}");
    for ranks in [2, 4] {
        let (found, _) = trained(ranks);
        let distance = distance(&found, &expected);
        assert!(distance < 1e-3, "{ranks} ranks: {distance}");
    }
}

#[test]
fn a_state_continues_after_a_record() {
    let found = run_threads(2, GroupOptions::default(), |group| {
        let mut net = Net::new(SIZES[0], &group)?;
        let plan = shard_plan(&net)?;
        let new = || optimizers("lamb").0.init(&plan, &group).unwrap();
        let mut optimizer = new();
        for _ in 0..2 {
            let grads = net.grads();
            net = optimizer.step(0.01, net, grads);
        }
        let mut resumed = new().load_record(optimizer.to_record());
        let with_grads = |optimizer: &mut ModuleOptimizer| {
            let grads = net.grads();
            optimizer.step(0.01, net.clone(), grads).full()
        };
        Ok::<_, ParallelError>([with_grads(&mut optimizer), with_grads(&mut resumed)])
    });
    for found in found {
        let [expected, resumed] = found.unwrap();
        assert_eq!(expected, resumed);
    }
}

#[test]
fn a_plan_of_another_group_is_refused() {
    let errors = run_threads(2, GroupOptions::default(), |group| {
        let net = Net::new(SIZES[0], &group)?;
        let plan = shard_plan(&net)?;
        let alone = Group::single(0);
        let error = optimizers("adam").0.init(&plan, &alone).err();
        Ok::<_, ParallelError>(error.unwrap().to_string())
    });
    for error in errors {
        let error = error.unwrap();
        assert!(
            error.contains("pass the group that splits the module"),
            "{error}"
        );
    }
}

/// Casts parameters to bf16.
struct ToBf16;

impl ModuleMapper for ToBf16 {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| Tensor::from_inner(value.inner().cast(FloatDType::BF16)).require_grad())
    }
}

/// This rank's parts of gradients that are known for the full parameters.
struct Known<'a> {
    path: Vec<String>,
    shards: &'a GroupShards,
    step: usize,
    grads: GradientsParams,
}

impl ModuleVisitor for Known<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let shards = self.shards.get(&self.path.join(".")).unwrap();
        let shape = shards.own().global_shape.clone();
        let len = shape.iter().product::<usize>() as i64;
        let full = Tensor::<1, Int>::arange(0..len, &Device::flex()).float();
        let full = (full * 0.3 + self.step as f32).sin();
        let full: Tensor<D> = full.reshape::<D, _>(<[usize; D]>::try_from(shape).unwrap());
        let part = shards.part(full.cast(FloatDType::BF16));
        self.grads.register(param.id, part);
    }
}

#[rstest]
#[case::adamw("adamw", None)]
#[case::lamb("lamb", None)]
#[case::muon("muon", None)]
#[case::norm("sgd", Some(GradientClipping::Norm(0.1)))]
fn parameters_in_bf16_are_updated_as_on_one_rank(
    #[case] name: &str,
    #[case] clipping: Option<GradientClipping>,
) {
    let trained = |ranks| {
        let found = run_threads(ranks, GroupOptions::default(), |group| {
            let mut net = Net::new(SIZES[0], &group)?.map(&mut ToBf16);
            let plan = shard_plan(&net)?;
            let shards = GroupShards::new(&plan, &group).unwrap();
            let (sharded, plain) = optimizers(name);
            let mut optimizer = match (ranks, clipping.clone()) {
                (1, None) => plain,
                (1, Some(clipping)) => plain.with_grad_clipping(clipping),
                (_, None) => sharded.init(&plan, &group).unwrap(),
                (_, Some(clipping)) => {
                    let sharded = sharded.with_grad_clipping(clipping);
                    sharded.init(&plan, &group).unwrap()
                }
            };
            for step in 0..4 {
                let mut known = Known {
                    path: Vec::new(),
                    shards: &shards,
                    step,
                    grads: GradientsParams::new(),
                };
                net.visit(&mut known);
                net = optimizer.step(0.02, net, known.grads);
            }
            assert_eq!(net.up.weight.val().dtype(), FloatDType::BF16.into());
            Ok::<_, ParallelError>(net.full())
        });
        let mut found: Vec<_> = found.into_iter().map(Result::unwrap).collect();
        found.remove(0)
    };
    let expected = trained(1);
    for ranks in [2, 4] {
        let found = trained(ranks);
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            // One unit in the last place of bf16: the norms are summed in another order.
            let unit = expected.abs() / 128.0 + 1e-6;
            assert!((found - expected).abs() <= unit, "{found} and {expected}");
        }
    }
}
