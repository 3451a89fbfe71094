//! A transformer of Burn's layers, split by a plan, against itself.

use std::collections::BTreeMap;

use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param},
    nn::{
        Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, LinearLayout,
    },
    optim::GradientsParams,
    prelude::{Device, Int},
    tensor::{
        Tensor, TensorData, Tolerance,
        activation::{gelu, softmax},
    },
};
use megaburn_collective::{GroupOptions, GroupShards, run_threads};
use megaburn_parallel::{
    ParallelError, ParallelLinear, ParallelPlan, Sharded, VocabParallelEmbedding, parallelize,
    shard_plan,
};
use rstest::rstest;

const TOKENS: usize = 13;
const D_MODEL: usize = 12;
/// Query heads, key and value heads, and the features of a head.
const HEADS: [usize; 3] = [4, 2, 3];

/// The transformer as a Burn program has it.
pub(crate) mod plain {
    use super::*;

    #[derive(Module, Debug)]
    pub(crate) struct Attention {
        pub(crate) query: Linear,
        pub(crate) key: Linear,
        pub(crate) value: Linear,
        pub(crate) output: Linear,
    }

    #[derive(Module, Debug)]
    pub(crate) struct Block {
        pub(crate) norm: LayerNorm,
        pub(crate) attention: Attention,
        pub(crate) up: Linear,
        pub(crate) down: Linear,
    }

    #[derive(Module, Debug)]
    pub(crate) struct Net {
        pub(crate) embedding: Embedding,
        pub(crate) blocks: Vec<Block>,
        pub(crate) norm: LayerNorm,
        pub(crate) bottleneck: Linear,
        pub(crate) head: Linear,
    }
}

/// The same with other types of fields.
pub(crate) mod split {
    use super::*;

    #[derive(Module, Sharded, Debug)]
    pub(crate) struct Attention {
        pub(crate) query: ParallelLinear,
        pub(crate) key: ParallelLinear,
        pub(crate) value: ParallelLinear,
        pub(crate) output: ParallelLinear,
    }

    #[derive(Module, Sharded, Debug)]
    pub(crate) struct Block {
        #[sharded(replicated)]
        pub(crate) norm: LayerNorm,
        pub(crate) attention: Attention,
        pub(crate) up: ParallelLinear,
        pub(crate) down: ParallelLinear,
    }

    #[derive(Module, Sharded, Debug)]
    pub(crate) struct Net {
        pub(crate) embedding: VocabParallelEmbedding,
        pub(crate) blocks: Vec<Block>,
        #[sharded(replicated)]
        pub(crate) norm: LayerNorm,
        /// No pattern matches it.
        pub(crate) bottleneck: ParallelLinear,
        pub(crate) head: ParallelLinear,
    }
}

/// `[batch, seq, heads * features]` to `[batch, heads, seq, features]`, with the heads of this rank.
fn heads(x: Tensor<3>) -> Tensor<4> {
    let [batch, seq, width] = x.dims();
    x.reshape([batch, seq, width / HEADS[2], HEADS[2]])
        .swap_dims(1, 2)
}

/// The forward pass, which is the same in both.
macro_rules! forward {
    ($of:ident) => {
        impl $of::Attention {
            fn forward(&self, x: Tensor<3>) -> Tensor<3> {
                let query = heads(self.query.forward(x.clone()));
                let [batch, query_heads, seq, features] = query.dims();
                let shared = |x: Tensor<4>| {
                    let [_, own_heads, _, _] = x.dims();
                    let repeats = query_heads / own_heads;
                    let x = x.unsqueeze_dim::<5>(2).repeat_dim(2, repeats);
                    x.reshape([batch, query_heads, seq, features])
                };
                let key = shared(heads(self.key.forward(x.clone())));
                let value = shared(heads(self.value.forward(x)));
                let scores = query
                    .matmul(key.transpose())
                    .div_scalar((features as f32).sqrt());
                let context = softmax(scores, 3).matmul(value).swap_dims(1, 2);
                let context = context.reshape([batch, seq, query_heads * features]);
                self.output.forward(context)
            }
        }

        impl $of::Net {
            fn forward(&self, ids: Tensor<2, Int>) -> Tensor<3> {
                let mut x = self.embedding.forward(ids);
                for block in &self.blocks {
                    let normed = block.norm.forward(x.clone());
                    x = x + block.attention.forward(normed.clone());
                    x = x + block.down.forward(gelu(block.up.forward(normed)));
                }
                let x = self.norm.forward(x);
                self.head.forward(self.bottleneck.forward(x))
            }
        }
    };
}

forward!(plain);
forward!(split);

impl plain::Net {
    pub(crate) fn new(device: &Device) -> Self {
        let [query, key, features] = HEADS;
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        let block = |layout| plain::Block {
            norm: LayerNormConfig::new(D_MODEL).init(device),
            attention: plain::Attention {
                query: linear(D_MODEL, query * features),
                // The softmax would hide a bias of the keys.
                key: LinearConfig::new(D_MODEL, key * features)
                    .with_bias(false)
                    .init(device),
                value: linear(D_MODEL, key * features),
                output: linear(query * features, D_MODEL),
            },
            up: LinearConfig::new(D_MODEL, 20)
                .with_layout(layout)
                .init(device),
            down: linear(20, D_MODEL),
        };
        Self {
            embedding: EmbeddingConfig::new(TOKENS, D_MODEL).init(device),
            blocks: vec![block(LinearLayout::Row), block(LinearLayout::Col)],
            norm: LayerNormConfig::new(D_MODEL).init(device),
            bottleneck: linear(D_MODEL, 5),
            head: linear(5, 8),
        }
    }
}

/// Gives a module weights that depend on a number only.
pub(crate) struct Fill(pub(crate) f32);

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0 += 1.0;
        let start = self.0;
        param.map(|value| {
            let len = value.shape().num_elements() as i64;
            let values = Tensor::<1, Int>::arange(0..len, &value.device().inner()).float();
            let values = (values * 7.3 + start * 1.7).sin() * 0.6;
            Tensor::from_inner(values.reshape(value.shape())).require_grad()
        })
    }
}

impl From<plain::Net> for split::Net {
    fn from(net: plain::Net) -> Self {
        let block = |block: plain::Block| split::Block {
            norm: block.norm,
            attention: split::Attention {
                query: block.attention.query.into(),
                key: block.attention.key.into(),
                value: block.attention.value.into(),
                output: block.attention.output.into(),
            },
            up: block.up.into(),
            down: block.down.into(),
        };
        Self {
            embedding: net.embedding.into(),
            blocks: net.blocks.into_iter().map(block).collect(),
            norm: net.norm,
            bottleneck: net.bottleneck.into(),
            head: net.head.into(),
        }
    }
}

pub(crate) fn plan() -> ParallelPlan {
    ParallelPlan::new()
        .vocabulary("embedding")
        .column("blocks.*.attention.query")
        .heads(HEADS[0])
        .column("blocks.*.attention.{key,value}")
        .shared_heads(HEADS[1])
        .row("blocks.*.attention.output")
        .heads(HEADS[0])
        .column("blocks.*.up")
        .row("blocks.*.down")
        .column_gathered("head")
}

fn ids(device: &Device) -> Tensor<2, Int> {
    let ids = Tensor::<1, Int>::arange(0..10, device).mul_scalar(5);
    ids.remainder_scalar(TOKENS as i64).reshape([2, 5])
}

fn loss(logits: Tensor<3>) -> Tensor<1> {
    let logits = logits.exp();
    (logits.clone() / logits.sum_dim(2)).square().mean() * 10
}

/// The gradient of each full parameter by its path.
struct Grads<'a> {
    path: Vec<String>,
    shards: Option<GroupShards>,
    grads: &'a GradientsParams,
    found: BTreeMap<String, TensorData>,
}

impl ModuleVisitor for Grads<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        let mut grad = self.grads.get::<D>(param.id).unwrap();
        if let Some(shards) = &self.shards {
            grad = shards.get(&path).unwrap().gather(grad).unwrap();
        }
        self.found.insert(path, grad.into_data());
    }
}

pub(crate) fn grads<M: Module>(
    module: &M,
    logits: Tensor<3>,
    shards: Option<GroupShards>,
) -> BTreeMap<String, TensorData> {
    let grads = GradientsParams::from_grads(loss(logits).backward(), module);
    let mut visitor = Grads {
        path: Vec::new(),
        shards,
        grads: &grads,
        found: BTreeMap::new(),
    };
    module.visit(&mut visitor);
    visitor.found
}

pub(crate) fn close(found: &TensorData, expected: &TensorData) {
    found.assert_approx_eq::<f32>(expected, Tolerance::absolute(1e-5));
}

#[rstest]
fn a_split_transformer_is_the_original(#[values(1, 2, 4)] ranks: usize) {
    let device = Device::flex().autodiff();
    let net = plain::Net::new(&device).map(&mut Fill(0.0));
    let logits = net.forward(ids(&device));
    let expected = grads(&net, logits.clone(), None);
    let found = run_threads(ranks, GroupOptions::default(), |group| {
        // The other ranks have weights of their own, which rank 0's replace.
        let own = match group.rank() {
            0 => net.clone(),
            rank => plain::Net::new(&device).map(&mut Fill(rank as f32)),
        };
        let split = parallelize(split::Net::from(own), &plan(), &group)?;
        let up = split.blocks[0].up.weight.dims();
        let logits = split.forward(ids(&device));
        let shards = GroupShards::new(&shard_plan(&split)?, &group).unwrap();
        let grads = grads(&split, logits.clone(), Some(shards));
        Ok::<_, ParallelError>((up, logits.into_data(), grads))
    });
    for found in found {
        let (up, of_rank, grads) = found.unwrap();
        assert_eq!(up, [D_MODEL, 20 / ranks]);
        close(&of_rank, &logits.to_data());
        assert_eq!(grads.len(), expected.len());
        for (path, grad) in &grads {
            let expected = &expected[path];
            assert!(expected.iter::<f32>().any(|x| x.abs() > 1e-4), "{path}");
            close(grad, expected);
        }
    }
}

#[test]
fn frozen_parameters_stay_frozen() {
    let found = run_threads(2, GroupOptions::default(), |group| {
        let mut net = split::Net::from(plain::Net::new(&Device::flex().autodiff()));
        net.blocks[0].up = net.blocks[0].up.clone().freeze();
        let net = parallelize(net, &plan(), &group)?;
        let is_trained = |layer: &ParallelLinear| layer.weight.is_require_grad();
        let up = [&net.blocks[0].up, &net.blocks[1].up];
        Ok::<_, ParallelError>(up.map(is_trained))
    });
    for found in found {
        assert_eq!(found.unwrap(), [false, true]);
    }
}
