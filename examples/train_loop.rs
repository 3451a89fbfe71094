//! A training loop without `Trainer`: model, gradients, optimizer and schedule of a small Llama on
//! four rank threads, with tensor, sequence and data parallelism.
//!
//! ```sh
//! cargo run --release --example train_loop
//! ```

use std::error::Error;

use burn::{
    prelude::{Device, Int},
    tensor::{Tensor, TensorData},
};
use megaburn::{
    data::{
        GlobalBatch, NUM_SYMBOLS, Sample, Sampler, Samples, Synthetic, SyntheticKind, TokenDataset,
    },
    mesh::Layout,
    models::{DecoderConfig, Family, decoder::ModelOptions},
    optim::{
        AdamWConfig, Decay, DeviceScalar, GradientAccumulator, LrSchedule, ShardingConfig,
        ShardingLevel,
    },
    parallel::shard_plan,
    prelude::{Group, GroupOptions, ProcessGroups, run_threads},
};

const STEPS: u64 = 100;
const SEQ_LEN: usize = 32;
/// Samples of a step over all ranks; a rank computes `MICRO_BATCH` samples at a time.
const GLOBAL_BATCH: usize = 16;
const MICRO_BATCH: usize = 4;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Trains one rank's shard of the model. Returns the losses of the first and the last step, in nats
/// per token.
fn train(world: &Group, layout: Layout, text: &TokenDataset) -> Result<(f64, f64)> {
    // The process groups of the layout: `tp` splits matrices, `dp` splits the batch.
    let groups = ProcessGroups::new(world, layout)?;
    let device = Device::flex();

    // This rank's shard of the model. `forward` has no communication call; the layers own it.
    let config = DecoderConfig {
        vocab: NUM_SYMBOLS,
        hidden: 64,
        ffn: 128,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        max_seq_len: SEQ_LEN,
        ..Family::LLAMA.template()
    };
    let options = ModelOptions {
        sequence_parallel: layout.sp,
        ..ModelOptions::default()
    };
    let mut model = config.init(&groups.tp, &options, &device.clone().autodiff())?;

    // Gradients and optimizer follow the shard plan; ZeRO-1 shards the optimizer state over `dp`.
    let plan = shard_plan(&model)?;
    let sharding = ShardingConfig::new(ShardingLevel::Optimizer).init(&model, &groups)?;
    let mut grads = GradientAccumulator::new(&model, &plan, &sharding)?;
    let mut optimizer = AdamWConfig::new().init(&sharding)?;
    let schedule = LrSchedule {
        init: 0.0,
        max: 1e-2,
        min: 1e-3,
        warmup_samples: 10 * GLOBAL_BATCH as u64,
        decay_samples: STEPS * GLOBAL_BATCH as u64,
        decay: Decay::Cosine,
    };

    let sampler = Sampler::shuffled(text.clone(), SEQ_LEN, world.seed())?;
    let batch = GlobalBatch::new(GLOBAL_BATCH, MICRO_BATCH, groups.dp.size())?;
    let num_tokens = (GLOBAL_BATCH * SEQ_LEN) as f64;
    let mut samples = 0; // read so far, by all ranks
    let (mut first_loss, mut last_loss) = (0.0, 0.0);
    for step in 1..=STEPS {
        // Forward and backward.
        grads.reset();
        let mut losses = Vec::new();
        for index in 0..batch.num_micro_batches() {
            let sample_indices = batch.micro_batch(samples, groups.dp.rank(), index);
            let (tokens, labels) = tensors(sampler.batch(sample_indices)?, &device);
            let loss = model.loss(tokens, labels); // summed over tokens, equal on all of `tp`
            losses.push(loss.clone().inner());
            grads.accumulate(&model, &mut loss.backward());
        }
        samples += GLOBAL_BATCH as u64;

        // Reduce, clip, update.
        grads.reduce()?; // over `dp`
        grads.scale(1.0 / num_tokens);
        let norm = grads.norm()?; // of the unsharded gradient, equal on every rank
        grads.clip(&norm, 1.0);
        let lr = schedule.lr(samples);
        model = optimizer.step(lr, model, &grads)?;

        last_loss = DeviceScalar::of(Tensor::cat(losses, 0), &groups.batch)?.read()? / num_tokens;
        if step == 1 {
            first_loss = last_loss;
        }
        if groups.is_main() && (step == 1 || step % 10 == 0) {
            let norm = norm.read()?;
            println!(
                "step {step:3}/{STEPS}  loss {last_loss:.4}  grad norm {norm:.3}  lr {lr:.2e}"
            );
        }
    }
    Ok((first_loss, last_loss))
}

/// The inputs and next-token labels, `[seq, batch]` each, of samples of `SEQ_LEN + 1` tokens.
fn tensors(samples: Vec<Sample>, device: &Device) -> (Tensor<2, Int>, Tensor<2, Int>) {
    let samples: Vec<_> = samples.into_iter().map(Sample::into_tokens).collect();
    let from = |first: usize| {
        let rows = first..first + SEQ_LEN;
        let ids: Vec<i64> = rows
            .flat_map(|at| samples.iter().map(move |sample| i64::from(sample[at])))
            .collect();
        Tensor::from_data(TensorData::new(ids, [SEQ_LEN, samples.len()]), device)
    };
    (from(0), from(1))
}

fn main() -> Result<()> {
    // A generated text of known entropy, which no model's loss can go below.
    let synthetic = Synthetic::new(SyntheticKind::Markov, 1)?;
    let text = TokenDataset::from_tokens("markov", &synthetic.tokens(100_000), NUM_SYMBOLS)?;
    let layout: Layout = "tp2-dp2-sp".parse()?;
    println!(
        "layout {layout}, lowest possible loss {:.4}",
        synthetic.entropy()
    );

    let ranks = run_threads(layout.world_size(), GroupOptions::default(), |world| {
        train(&world, layout, &text)
    });
    for rank in ranks {
        let (first, last) = rank.map_err(|failure| failure.to_string())?;
        assert!(last < 0.6 * first, "loss {first:.4} -> {last:.4}");
    }
    Ok(())
}
