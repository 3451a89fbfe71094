//! Plans of runs: memory, traffic, time, and the command.

mod command;
mod experts;
mod measured;
mod memory;
mod schedules;
mod search;
mod traffic;
mod walk;

use std::path::Path;

use megaburn::{
    mesh::Layout,
    plan::{Gpu, Plan, PlanConfig},
    train::{ConfigLayers, TrainConfig},
};

pub(crate) fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// Llama-3-8B except for its depth, as the benches train it: `benches/src/gpu/ranks.rs`.
const LLAMA: &str = "
[model]
hidden = 4096
ffn = 14336
heads = 32
kv_heads = 8
vocab = 128256
rope_theta = 500000.0
tied = false
[train]
micro_batch = 1
dtype = \"bf16\"
[optimizer]
lr = 1e-5
min_lr = 1e-5
warmup_steps = 0
";

/// A configuration from a text, a layout and `KEY=VALUE` settings, with this number of
/// micro-batches on each data-parallel rank. A micro-batch has one sample, unless a setting says
/// otherwise.
fn config(text: &str, layout: &str, micro_batches: usize, sets: &str) -> TrainConfig {
    let dp = layout.parse::<Layout>().unwrap().dp;
    let mut sizes = sets
        .split_whitespace()
        .filter_map(|set| set.strip_prefix("train.micro_batch="));
    let micro_batch: usize = sizes.next().map_or(1, |size| size.parse().unwrap());
    let batch = format!(
        "[train]\nmicro_batch = {micro_batch}\nglobal_batch = {}",
        micro_batch * dp * micro_batches
    );
    let layers = ConfigLayers::new().with_text("plan", text).unwrap();
    let layers = layers.with_text("batch", &batch).unwrap();
    let layers = layers.with_layout(layout).unwrap();
    let set = |layers: ConfigLayers, set| layers.with_set(set).unwrap();
    sets.split_whitespace().fold(layers, set).load().unwrap()
}

fn plan(config: TrainConfig, gpu: Gpu) -> Plan {
    let layout = config.layout(None).unwrap();
    PlanConfig::new(config, layout)
        .with_gpu(gpu)
        .plan()
        .unwrap()
}
