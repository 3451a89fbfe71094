//! A model of Burn's own layers, split over ranks by a plan of path patterns, trained with Burn's LAMB
//! and then adapted with LoRA: the same losses on 1, 2 and 4 ranks.
//!
//! ```sh
//! cargo run --release --example parallelize
//! ```

use burn::{
    module::Module,
    nn::{
        EmbeddingConfig, LayerNorm, LayerNormConfig, LinearConfig,
        attention::MultiHeadAttentionConfig, loss::CrossEntropyLossConfig,
    },
    optim::{AdamWConfig, GradientsParams, LambConfig, ModuleOptimizer},
    prelude::{Device, Int},
    tensor::{Tensor, activation::gelu},
};
use megaburn::{
    parallel::{ParallelMhaInput, ParallelMultiHeadAttention, shard_plan},
    prelude::{
        Group, GroupOptions, ParallelLinear, ParallelPlan, Sharded, ShardedLora, ShardedOptimizer,
        VocabParallelEmbedding, parallelize, run_threads,
    },
};

const TOKENS: usize = 10;

/// A transformer of one block, which says the sum of two digits without the carry.
#[derive(Module, Sharded, Debug)]
struct Net {
    embedding: VocabParallelEmbedding, // was Embedding
    #[sharded(replicated)]
    norm: LayerNorm,
    attention: ParallelMultiHeadAttention, // was MultiHeadAttention
    up: ParallelLinear,                    // was Linear
    down: ParallelLinear,
    head: ParallelLinear,
}

impl Net {
    /// Burn's layers, each turned into the parallel one with its weights.
    fn new(device: &Device) -> Self {
        let attention = MultiHeadAttentionConfig::new(16, 4).with_dropout(0.0);
        Self {
            embedding: EmbeddingConfig::new(TOKENS, 16).init(device).into(),
            norm: LayerNormConfig::new(16).init(device),
            attention: attention.init(device).into(),
            up: LinearConfig::new(16, 48).init(device).into(),
            down: LinearConfig::new(48, 16).init(device).into(),
            head: LinearConfig::new(16, TOKENS).init(device).into(),
        }
    }

    /// Which layers are split: nothing else in the model says it.
    fn plan() -> ParallelPlan {
        ParallelPlan::new()
            .vocabulary("embedding")
            .attention("attention", 4)
            .column("up")
            .row("down")
            .whole("head")
    }

    /// `[batch, 2]` digits to `[batch, tokens]` logits.
    fn forward(&self, digits: Tensor<2, Int>) -> Tensor<2> {
        let x = self.embedding.forward(digits);
        let normed = self.norm.forward(x.clone());
        let x = x + self
            .attention
            .forward(ParallelMhaInput::self_attn(normed))
            .context;
        let x = x.clone() + self.down.forward(gelu(self.up.forward(x)));
        self.head.forward(x.mean_dim(1).squeeze_dim(1))
    }

    fn loss(&self, device: &Device) -> Tensor<1> {
        let first = Tensor::<1, Int>::arange(0..100, device) / 10;
        let second = Tensor::<1, Int>::arange(0..100, device).remainder_scalar(10);
        let sums = (first.clone() + second.clone()).remainder_scalar(10);
        let logits = self.forward(Tensor::stack(vec![first, second], 1));
        CrossEntropyLossConfig::new()
            .init(device)
            .forward(logits, sums)
    }
}

/// Trains for some steps and returns the net and its last loss.
fn train(mut net: Net, optimizer: &mut ModuleOptimizer, steps: usize, lr: f64) -> (Net, f32) {
    let device = Device::flex().autodiff();
    let mut last = 0.0;
    for _ in 0..steps {
        let loss = net.loss(&device);
        last = loss.clone().into_scalar::<f32>();
        let grads = GradientsParams::from_grads(loss.backward(), &net);
        net = optimizer.step(lr, net, grads);
    }
    (net, last)
}

/// The losses on this rank: after training, and after LoRA.
fn run(net: Net, group: &Group) -> Result<(f32, f32), Box<dyn std::error::Error>> {
    let net = parallelize(net, &Net::plan(), group)?;
    // LAMB scales an update by the norms of a parameter and its update, of which a rank has parts.
    let optimizer = ShardedOptimizer::new(LambConfig::new().build());
    let mut optimizer = optimizer.init(&shard_plan(&net)?, group)?;
    let (net, trained) = train(net, &mut optimizer, 60, 0.02);
    let net = ShardedLora::new(2, 4.0).apply(net)?;
    let (_, adapted) = train(net, &mut AdamWConfig::new().init(), 20, 0.01);
    Ok((trained, adapted))
}

fn main() {
    let device = Device::flex().autodiff();
    device.seed(7);
    let net = Net::new(&device);
    for world_size in [1, 2, 4] {
        let ranks = run_threads(world_size, GroupOptions::default(), |group| {
            run(net.clone(), &group).map_err(|error| error.to_string())
        });
        for (rank, losses) in ranks.into_iter().enumerate() {
            match losses {
                Ok((trained, adapted)) => {
                    println!("rank {rank} of {world_size}: loss {trained:.5} -> {adapted:.5}");
                }
                Err(error) => println!("rank {rank} of {world_size}: {error}"),
            }
        }
    }
}
