//! Ranks of large worlds walk a step of the real model with narrow matrices: their calls agree, and
//! what they send is what the plan says.

use std::{fs, sync::Arc};

use burn::prelude::Device;
use megaburn::{
    collective::{Collective, Group, GroupOptions, ProcessGroups, TracedCall},
    mesh::Layout,
    plan::{Gpu, Walk},
    train::{ConfigLayers, RunData, TrainConfig, Trainer},
};
use rstest::rstest;

use super::{config, plan, root};

/// Llama-3-405B with its heads and layout, fewer layers and narrow matrices.
const NARROW: &str = "
[model]
hidden = 128
ffn = 256
layers = 32
heads = 128
head_dim = 2
kv_heads = 8
vocab = 512
tied = false
[data]
seq_len = 32
[train]
micro_batch = 1
[optimizer]
warmup_steps = 0
";

/// The calls of a step of one rank.
fn calls_of(config: &Arc<TrainConfig>, layout: Layout, rank: usize) -> Vec<TracedCall> {
    let world = Group::rehearsal(rank, layout.world_size(), GroupOptions::default());
    let groups = ProcessGroups::new(&world, layout).unwrap();
    let data = Arc::new(RunData::load(config).unwrap());
    let device = Device::flex().autodiff();
    let mut trainer = Trainer::new(config.clone(), groups, device, data).unwrap();
    trainer.step().unwrap();
    world.trace_calls();
    trainer.step().unwrap();
    world.take_traced_calls()
}

#[test]
fn ranks_of_a_large_world_send_what_is_planned() {
    let layout: Layout = "tp8-pp16-dp128-sp".parse().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("text.txt");
    fs::write(&file, "It was the best of times. ".repeat(4000)).unwrap();
    let set = format!("data.path={} parallel.zero=1", file.display());
    let config = Arc::new(config(NARROW, "tp8-pp16-dp128-sp", 16, &set));
    let of_stage = layout.world_size() / layout.pp;
    let planned = plan((*config).clone(), Gpu::H100);
    for stage in [0, 7, 15] {
        let calls = calls_of(&config, layout, stage * of_stage);
        let bytes = |call: &TracedCall| {
            let elements = call.call.shape.iter().product::<usize>();
            let bytes = (elements * call.call.dtype.size()) as f64;
            match call.call.op {
                Collective::AllGather => 7.0 * bytes,
                Collective::ReduceScatter(_) => 7.0 / 8.0 * bytes,
                Collective::AllReduce(_) => 2.0 * 7.0 / 8.0 * bytes,
                _ => 0.0,
            }
        };
        let over_tp = calls.iter().filter(|call| call.group == "tp");
        let over_tp: f64 = over_tp.map(bytes).sum();
        let of_plan = planned.traffic[stage].tp_bytes;
        let off = (over_tp - of_plan).abs() / of_plan;
        assert!(
            off < 0.05,
            "stage {stage}: {of_plan} planned, {over_tp} sent"
        );
    }
}

/// Every axis, schedule and stage of ZeRO on hundreds of ranks or more.
#[rstest]
#[case(
    "llama-3.1-405b-512xh100",
    "tp8-pp16-dp128-sp",
    "train.global_batch=2048 model.layers=32"
)]
#[case(
    "llama-3.1-405b-512xh100",
    "tp8-cp2-pp9-dp8-sp",
    "parallel.schedule=\"interleaved\" parallel.chunks=2 parallel.zero=2 model.layers=36"
)]
#[case(
    "deepseek-v3-256xh200",
    "tp2-pp4-dp512-ep64-sp",
    "parallel.schedule=\"zb-h1\" train.global_batch=2048 model.layers=12 \
    parallel.pipeline_layout=Et*3|t*3|t*3|t*3L model.experts.layer_freq=([0]*3+[1]*9)"
)]
#[case("mixtral-8x7b-16xh100", "tp4-cp2-dp64-ep8-sp", "parallel.zero=3")]
#[case("gpt-3-175b-128xh100", "tp8-pp8-dp64-sp", "model.layers=16")]
fn ranks_of_a_large_world_agree(#[case] recipe: &str, #[case] layout: &str, #[case] sets: &str) {
    let file = root().join(format!("configs/recipes/{recipe}.toml"));
    let layers = ConfigLayers::new().with_file(file);
    let layers = layers.unwrap().with_layout(layout).unwrap();
    let set = |layers: ConfigLayers, set: &str| layers.with_set(set).unwrap();
    let config = sets.split_whitespace().fold(layers, set).load().unwrap();
    let layout: Layout = layout.parse().unwrap();
    let walk = Walk::of(&config, layout).unwrap();
    assert!(walk.ranks.len() > layout.pp, "{walk:?}");
    // Each block calls four collectives at least, in each micro-batch.
    assert!(walk.calls > 4 * config.model.layers, "{walk:?}");
    assert!(walk.compared > walk.ranks.len(), "{walk:?}");
}
