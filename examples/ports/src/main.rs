//! Compares ports of models of Burn's model zoo with the originals and with Transformers, on 1, 2 and 4
//! ranks. Every folder has a model in Hugging Face's format and its `reference.safetensors`:
//!
//! ```sh
//! cd examples/ports
//! cargo run --release ../../tests/fixtures/llama ../../tests/fixtures/bert
//! ```

mod bert;
mod bert_port;
mod llama;
mod llama_port;
mod model;
mod reference;

use std::{
    env,
    error::Error,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use burn::{
    optim::{AdamW, AdamWConfig, GradientsParams, ModuleOptimizer},
    prelude::Device,
    store::{BurnpackStore, ModuleSnapshot},
    tensor::Tensor,
};
use megaburn::{parallel::shard_plan, prelude::*};

use model::Model;
use reference::Reference;

const STEPS: usize = 3;

/// What one rank found.
struct Found {
    /// The largest distance of the logits to the original's, and to Transformers'.
    logits: [f32; 2],
    /// The losses of the steps.
    losses: Vec<f32>,
    /// The largest distance of the losses to Transformers'.
    losses_distance: f32,
    /// The largest distance of the trained port's logits to those of the original that read its
    /// weights. Rank 0 has it.
    read_back: Option<f32>,
}

type Load<M> = fn(&Path, &Device) -> Result<M, Box<dyn Error>>;
type LoadShards<M> = fn(&Path, &Device, &Group) -> Result<M, Box<dyn Error>>;

/// Compares a model with its port on one rank.
fn compare<O: Model, P: Model + Sharded>(
    folder: &Path,
    group: &Group,
    original: Load<O>,
    port: LoadShards<P>,
) -> Result<Found, Box<dyn Error>> {
    let device = Device::flex().autodiff();
    let reference = Reference::read(folder, &device)?;
    let mut original = original(folder, &device)?;
    let mut port = port(folder, &device, group)?;

    let logits = values(port.outputs(&reference).0);
    let of_original = values(original.outputs(&reference).0);
    let distances =
        [of_original, reference.floats("logits")].map(|other| distance(&logits, &other));

    let mut optimizer = optimizer(&port, group)?;
    let mut losses = Vec::new();
    for _ in 0..STEPS {
        let loss = port.outputs(&reference).1;
        losses.push(loss.clone().into_scalar::<f32>());
        let grads = GradientsParams::from_grads(loss.backward(), &port);
        port = optimizer.step(1e-3, port, grads);
    }
    let expected = reference.floats("train_losses");

    // The full weights, which the original reads as its own.
    let file = file(group.size());
    RecordFile::new(&file)
        .with_overwrite(true)
        .save(&port, group)?;
    let trained = values(port.outputs(&reference).0);
    let mut read_back = None;
    if group.rank() == 0 {
        original.load_from(&mut BurnpackStore::from_file(&file))?;
        read_back = Some(distance(&trained, &values(original.outputs(&reference).0)));
        // Tensors are read from the file when they are needed.
        fs::remove_file(&file)?;
    }
    Ok(Found {
        logits: distances,
        losses_distance: distance(&losses, &expected[..STEPS]),
        losses,
        read_back,
    })
}

/// The optimizer of the reference: AdamW, with weight decay of matrices only.
fn optimizer<M: Sharded + Model>(
    model: &M,
    group: &Group,
) -> Result<ModuleOptimizer, Box<dyn Error>> {
    let sharded =
        ShardedOptimizer::new(adamw(0.0)).with_group(|path| path.ends_with("weight"), adamw(0.1));
    Ok(sharded.init(&shard_plan(model)?, group)?)
}

fn adamw(weight_decay: f32) -> AdamW {
    AdamWConfig::new()
        .with_beta_2(0.95)
        .with_epsilon(1e-8)
        .with_weight_decay(weight_decay)
        .build()
}

/// The file that the ranks write.
fn file(ranks: usize) -> PathBuf {
    env::temp_dir().join(format!("ports-{}-{ranks}.bpk", std::process::id()))
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

/// The largest distance of two elements.
fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let distances = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    // NaN is the largest in this order.
    distances.max_by(f32::total_cmp).unwrap_or(0.0)
}

/// Runs one model on 1, 2 and 4 ranks.
fn run(folder: &Path) -> Result<(), Box<dyn Error>> {
    let is_bert = fs::read_to_string(folder.join("config.json"))?.contains("\"bert\"");
    for ranks in [1, 2, 4] {
        let found = run_threads(ranks, GroupOptions::default(), |group| {
            let found = if is_bert {
                compare(folder, &group, bert::Bert::load, bert_port::Bert::load)
            } else {
                compare(folder, &group, llama::Llama::load, llama_port::Llama::load)
            };
            found.map_err(|error| error.to_string())
        });
        let name = if is_bert { "bert" } else { "llama" };
        for (rank, found) in found.into_iter().enumerate() {
            let found = found?;
            let [original, transformers] = found.logits;
            let losses = [found.losses[0], found.losses[STEPS - 1]];
            let read_back = found
                .read_back
                .map_or("-".into(), |far| format!("{far:.1e}"));
            println!(
                "{name:>6} {rank:>4} of {ranks} {original:>9.1e} {transformers:>12.1e} {:>10.5} {:>9.5} {:>8.1e} \
                {read_back:>9}",
                losses[0], losses[1], found.losses_distance,
            );
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    println!(" model      rank  original transformers first loss last loss distance read back");
    for folder in env::args_os().skip(1) {
        if let Err(error) = run(Path::new(&folder)) {
            eprintln!("{}: {error}", folder.display());
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
