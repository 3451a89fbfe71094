//! LoRA and quantisation of shards against Burn's on the full module.

use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
};

use burn::{
    module::{Lora, Module, ModuleVisitor, Param, Quantizer},
    nn,
    optim::{AdamWConfig, GradientsParams},
    prelude::{Device, Int},
    tensor::{
        Tensor, TensorData, Tolerance,
        activation::gelu,
        quantization::{Calibration, QuantScheme, QuantValue},
    },
};
use megaburn_collective::{Group, GroupOptions, GroupShards, run_threads};
use megaburn_mesh::FusedPart;
use megaburn_parallel::{
    ParallelError, ParallelLinear, ParallelLinearConfig, ParallelPlan, Sharded, ShardedLora,
    ShardedQuantizer, VocabParallelEmbedding, VocabParallelEmbeddingConfig, parallelize,
    shard_plan,
};
use rstest::rstest;

#[derive(Module, Debug)]
struct Plain {
    embedding: nn::Embedding,
    up: nn::Linear,
    down: nn::Linear,
    head: nn::Linear,
}

#[derive(Module, Sharded, Debug)]
struct Net {
    embedding: VocabParallelEmbedding,
    up: ParallelLinear,
    down: ParallelLinear,
    #[sharded(replicated = group)]
    head: nn::Linear,
    #[module(skip)]
    group: Group,
}

/// Tokens, features, hidden features.
type Sizes = [usize; 3];

const SIZES: [Sizes; 2] = [[13, 5, 8], [16, 6, 12]];

fn ids(tokens: usize, device: &Device) -> Tensor<2, Int> {
    let ids = Tensor::<1, Int>::arange(0..6, device).mul_scalar(5);
    ids.remainder_scalar(tokens as i64).reshape([3, 2])
}

impl Plain {
    fn new([tokens, d_model, hidden]: Sizes, device: &Device) -> Self {
        Self {
            embedding: nn::EmbeddingConfig::new(tokens, d_model).init(device),
            up: nn::LinearConfig::new(d_model, hidden).init(device),
            down: nn::LinearConfig::new(hidden, d_model).init(device),
            head: nn::LinearConfig::new(d_model, 3).init(device),
        }
    }

    fn forward(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let x = self.up.forward(self.embedding.forward(ids));
        self.head.forward(self.down.forward(gelu(x)))
    }
}

impl Net {
    fn new([tokens, d_model, hidden]: Sizes, group: &Group) -> Result<Self, ParallelError> {
        let device = Device::flex().autodiff();
        let embedding = VocabParallelEmbeddingConfig::new(tokens, d_model).with_pad_multiple(1);
        let up = ParallelLinearConfig::column(d_model, hidden).with_name("up");
        let down = ParallelLinearConfig::row(hidden, d_model).with_name("down");
        // The head is the same on all ranks.
        let head = nn::LinearConfig::new(d_model, 3);
        let head = head.with_initializer(nn::Initializer::Constant { value: 0.3 });
        Ok(Self {
            embedding: embedding.with_name("embedding").init(group, &device)?,
            up: up.init(group, &device)?,
            down: down.init(group, &device)?,
            head: head.init(&device),
            group: group.clone(),
        })
    }

    fn forward(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let x = self.up.forward(self.embedding.forward(ids));
        self.head.forward(self.down.forward(gelu(x)))
    }

    /// The full values or gradients of all parameters by path.
    fn full(&self, grads: Option<&GradientsParams>) -> BTreeMap<String, TensorData> {
        let shards = GroupShards::new(&shard_plan(self).unwrap(), &self.group).unwrap();
        let mut visitor = Full {
            path: Vec::new(),
            shards,
            grads,
            found: BTreeMap::new(),
        };
        self.visit(&mut visitor);
        visitor.found
    }
}

struct Full<'a> {
    path: Vec<String>,
    shards: GroupShards,
    grads: Option<&'a GradientsParams>,
    found: BTreeMap<String, TensorData>,
}

impl ModuleVisitor for Full<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        let local = match self.grads {
            None => Some(param.val().inner().dequantize()),
            Some(grads) => grads.get::<D>(param.id),
        };
        let shards = self.shards.get(&path).unwrap();
        if let Some(local) = local {
            let full = shards.gather(local).unwrap();
            self.found.insert(path, full.into_data());
        }
    }
}

fn on_ranks<T: Send>(ranks: usize, body: impl Fn(Group) -> T + Sync) -> Vec<T> {
    let found = run_threads(ranks, GroupOptions::default(), |group| {
        Ok::<_, ParallelError>(body(group))
    });
    found.into_iter().map(Result::unwrap).collect()
}

fn assert_close(found: &BTreeMap<String, TensorData>, expected: &BTreeMap<String, TensorData>) {
    assert_eq!(
        found.keys().collect::<Vec<_>>(),
        expected.keys().collect::<Vec<_>>()
    );
    for (path, values) in expected {
        let differences = values.iter::<f32>().zip(found[path].iter::<f32>());
        let largest = differences.fold(0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(largest < 1e-5, "{path}: {largest}");
    }
}

/// The logits, the gradients, and the parameters after three steps.
type Trained = (
    TensorData,
    BTreeMap<String, TensorData>,
    BTreeMap<String, TensorData>,
);

fn trained(sizes: Sizes, group: &Group) -> Trained {
    let device = Device::flex().autodiff();
    let net = Net::new(sizes, group).unwrap();
    let mut net = ShardedLora::new(2, 3.0).apply(net).unwrap();
    let mut optimizer = AdamWConfig::new().init();
    let mut first = None;
    for _ in 0..3 {
        let logits = net.forward(ids(sizes[0], &device));
        let loss = (logits.clone() - 0.5).square().mean();
        let grads = GradientsParams::from_grads(loss.backward(), &net);
        if first.is_none() {
            first = Some((logits.into_data(), net.full(Some(&grads))));
        }
        net = optimizer.step(0.1, net, grads);
    }
    let (logits, grads) = first.unwrap();
    (logits, grads, net.full(None))
}

#[rstest]
fn factors_of_shards_are_trained_as_on_one_rank(#[values(0, 1)] case: usize) {
    let sizes = SIZES[case];
    let expected = on_ranks(1, |group| trained(sizes, &group)).remove(0);
    // Two factors of each of four weights; nothing else gets a gradient.
    assert_eq!(expected.1.len(), 8);
    for ranks in [2, 4] {
        for found in on_ranks(ranks, |group| trained(sizes, &group)) {
            found
                .0
                .assert_approx_eq::<f32>(&expected.0, Tolerance::absolute(1e-5));
            assert_close(&found.1, &expected.1);
            assert_close(&found.2, &expected.2);
        }
    }
}

#[test]
fn on_one_rank_it_is_burns_lora() {
    let device = Device::flex().autodiff();
    let group = Group::single(3);
    let net = ShardedLora::new(2, 3.0)
        .apply(Net::new(SIZES[0], &group).unwrap())
        .unwrap();
    // Both factors, so that both have an effect.
    let net = net.map(&mut Filled);
    let plain = Plain::new(SIZES[0], &device).apply_lora(Lora::new(2, 3.0));
    let plain = plain.load_record(net.clone().into_record());
    let found = net.forward(ids(13, &device));
    let expected = plain.forward(ids(13, &device));
    assert_eq!(found.to_data(), expected.to_data());
    let grads = found.sum().backward();
    let of_plain = expected.sum().backward();
    let of = |param: &Param<Tensor<2>>, grads: &_| param.val().grad(grads).unwrap().into_data();
    let adapter = plain.up.weight.adapter().unwrap();
    let ours = net
        .up
        .weight
        .reparameterization::<megaburn_parallel::ShardedAdapter>()
        .unwrap();
    assert_eq!(of(&ours.a, &grads), of(&adapter.a, &of_plain));
    assert_eq!(of(&ours.b, &grads), of(&adapter.b, &of_plain));
    // Merged, the weights have the same effect.
    let merged = net.clone().materialize();
    let logits = merged.forward(ids(13, &device)).into_data();
    logits.assert_approx_eq::<f32>(
        &plain.forward(ids(13, &device)).into_data(),
        Tolerance::absolute(1e-6),
    );
}

/// Sets every element of a factor to a number other than zero.
struct Filled;

impl burn::module::ModuleMapper for Filled {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !param.is_require_grad() {
            return param;
        }
        param.map(|value| Tensor::from_inner(value.inner().sin() + 0.1).require_grad())
    }
}

#[test]
fn burns_lora_on_shards_is_refused() {
    let texts = on_ranks(2, |group| {
        let net = Net::new(SIZES[0], &group).unwrap();
        let net = net.apply_lora(Lora::new(2, 3.0));
        let device = Device::flex().autodiff();
        let plan = shard_plan(&net).unwrap_err().to_string();
        let forward = AssertUnwindSafe(|| drop(net.forward(ids(13, &device))));
        let panic = catch_unwind(forward).unwrap_err();
        (plan, panic.downcast_ref::<String>().unwrap().clone())
    });
    for (plan, panic) in texts {
        let expected = "`down.weight.lora.a` is a factor of Burn's `apply_lora`";
        assert!(plan.contains(expected), "{plan}");
        assert!(
            panic.contains("use `megaburn::parallel::ShardedLora`"),
            "{panic}"
        );
    }
}

#[derive(Module, Sharded, Debug)]
struct Kept {
    embedding: VocabParallelEmbedding,
    up: ParallelLinear,
    head: ParallelLinear,
}

#[test]
fn burns_lora_on_copies_is_refused() {
    let panics = on_ranks(2, |group| {
        let device = Device::flex().autodiff();
        let linear = |to| nn::LinearConfig::new(4, to).init(&device).into();
        let net = Kept {
            embedding: nn::EmbeddingConfig::new(13, 4).init(&device).into(),
            up: linear(4),
            head: linear(3),
        };
        let plan = ParallelPlan::new().column_gathered("up");
        let net = parallelize(net, &plan, &group).unwrap();
        let net = net.apply_lora(Lora::new(2, 3.0));
        let text = |result: std::thread::Result<()>| {
            let panic = result.unwrap_err();
            panic.downcast_ref::<String>().unwrap().clone()
        };
        let of_head = || drop(net.head.forward(Tensor::<2>::ones([2, 4], &device)));
        let of_embedding = || drop(net.embedding.forward(ids(13, &device)));
        [
            text(catch_unwind(AssertUnwindSafe(of_head))),
            text(catch_unwind(AssertUnwindSafe(of_embedding))),
        ]
    });
    for panic in panics.into_iter().flatten() {
        assert!(panic.contains("a shard or a copy in group"), "{panic}");
        assert!(
            panic.contains("`megaburn::parallel::ShardedLora`"),
            "{panic}"
        );
    }
}

#[test]
fn what_cannot_be_adapted_is_refused() {
    for error in on_ranks(2, |group| {
        let heads = [FusedPart::units(2, 2), FusedPart::units(1, 2)];
        let shared = ParallelLinearConfig::column(4, 6)
            .with_parts(heads)
            .with_name("shared");
        let shared = vec![shared.init(&group, &Device::flex()).unwrap()];
        let of_heads = ShardedLora::new(2, 3.0).apply(Layers { layers: shared });
        let net = Net::new(SIZES[0], &group).unwrap();
        let none = ShardedLora::new(2, 3.0).with_group(|path| path.contains("nothere"));
        let again = ShardedLora::new(2, 3.0)
            .apply(Net::new(SIZES[0], &group).unwrap())
            .unwrap();
        [
            of_heads.unwrap_err().to_string(),
            none.apply(net).unwrap_err().to_string(),
            ShardedLora::new(2, 3.0)
                .apply(again)
                .unwrap_err()
                .to_string(),
        ]
    }) {
        assert!(
            error[0].contains("`layers.0.weight`: several ranks hold"),
            "{}",
            error[0]
        );
        assert!(
            error[1].contains("no matrix of a linear layer"),
            "{}",
            error[1]
        );
        assert!(
            error[2].contains("merge them first with `materialize`"),
            "{}",
            error[2]
        );
    }
}

#[derive(Module, Sharded, Debug)]
struct Layers {
    layers: Vec<ParallelLinear>,
}

fn scheme() -> QuantScheme {
    let scheme = Device::flex().settings().quantization.scheme;
    scheme.with_value(QuantValue::Q8S)
}

#[rstest]
#[case::min_max(Calibration::MinMax)]
#[case::abs_mean(Calibration::AbsMean)]
fn shards_are_quantised_as_the_full_matrix_is(#[case] calibration: Calibration) {
    let copy = || match calibration {
        Calibration::MinMax => Calibration::MinMax,
        Calibration::AbsMean => Calibration::AbsMean,
    };
    for sizes in SIZES {
        let expected = on_ranks(1, |group| {
            let net = Net::new(sizes, &group).unwrap().valid();
            let mut quantizer = Quantizer::new(copy(), scheme());
            let matrices = burn::module::ParamGroup::from_predicate("weight");
            net.quantize_weights_group(&mut quantizer, matrices)
                .full(None)
        })
        .remove(0);
        for ranks in [1, 2, 4] {
            for found in on_ranks(ranks, |group| {
                let net = Net::new(sizes, &group).unwrap().valid();
                let net = ShardedQuantizer::new(copy(), scheme())
                    .apply(net, &group)
                    .unwrap();
                let logits = net.forward(ids(sizes[0], &Device::flex()));
                assert!(logits.into_data().iter::<f32>().all(f32::is_finite));
                net.full(None)
            }) {
                // A mean is summed in another order.
                assert_close(&found, &expected);
            }
        }
    }
}

#[test]
fn quantised_weights_are_adapted_as_on_one_rank() {
    let trained = |group: Group| {
        let device = Device::flex().autodiff();
        let net = Net::new(SIZES[0], &group).unwrap();
        let quantizer = ShardedQuantizer::new(Calibration::MinMax, scheme());
        let net = quantizer.apply(net, &group).unwrap();
        let net = ShardedLora::new(2, 3.0).apply(net).unwrap();
        let logits = net.forward(ids(SIZES[0][0], &device));
        let loss = (logits.clone() - 0.5).square().mean();
        let grads = GradientsParams::from_grads(loss.backward(), &net);
        (logits.into_data(), net.full(Some(&grads)))
    };
    let (logits, grads) = on_ranks(1, trained).remove(0);
    assert_eq!(grads.len(), 8);
    for ranks in [2, 4] {
        for found in on_ranks(ranks, trained) {
            found
                .0
                .assert_approx_eq::<f32>(&logits, Tolerance::absolute(1e-5));
            assert_close(&found.1, &grads);
        }
    }
}

#[test]
fn blocks_that_ranks_could_cut_are_refused() {
    for error in on_ranks(2, |group| {
        let net = Net::new(SIZES[0], &group).unwrap().valid();
        let scheme = scheme().per_block([2], burn::tensor::quantization::ScaleDtype::F32);
        let quantizer = ShardedQuantizer::new(Calibration::MinMax, scheme);
        quantizer.apply(net, &group).unwrap_err().to_string()
    }) {
        assert!(error.contains("could cut blocks between ranks"), "{error}");
    }
}
