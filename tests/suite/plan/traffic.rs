//! The bytes that a plan says are those of the collectives that ranks on CPUs call.

use std::{collections::BTreeMap, fs, sync::Arc};

use burn::prelude::Device;
use megaburn::{
    collective::{Collective, FlightRecord, GroupOptions, ProcessGroups, run_threads},
    mesh::Layout,
    plan::Gpu,
    train::{ConfigLayers, RunData, TrainConfig, TrainError, Trainer},
};
use rstest::rstest;

use super::{config, plan};

const MODEL: &str = "
[model]
hidden = 64
ffn = 160
layers = 2
heads = 4
kv_heads = 2
vocab = 512
tied = false
[data]
seq_len = 64
[train]
global_batch = 4
micro_batch = 1
[optimizer]
warmup_steps = 0
";

/// The axis of a group of ranks, by its name.
fn axis(group: &str) -> Option<&'static str> {
    match group {
        "tp" => Some("tp"),
        "cp" => Some("cp"),
        // With `parallel.zero_ranks`: the ranks that shard, and those with the same shards.
        "dp-cp" | "dp" | "edp" | "share" | "copies" => Some("dp"),
        name if name.starts_with("pp") => Some("pp"),
        _ => None,
    }
}

/// The bytes that a rank sends in a ring for a call.
fn sent(record: &FlightRecord, ranks: usize) -> f64 {
    let call = &record.call;
    let bytes = (call.shape.iter().product::<usize>() * call.dtype.size()) as f64;
    let others = (ranks - 1) as f64 / ranks as f64;
    match call.op {
        Collective::AllReduce(_) => 2.0 * others * bytes,
        Collective::AllGather => (ranks - 1) as f64 * bytes,
        Collective::ReduceScatter(_) | Collective::AllToAll => others * bytes,
        // A rank of a ring sends and receives, and both are recorded.
        Collective::Send if record.group == "cp" => bytes / 2.0,
        Collective::Shift { .. } | Collective::Send => bytes,
        Collective::Broadcast { .. } | Collective::Barrier => 0.0,
    }
}

/// The bytes that each rank sends in the second step, by axis.
fn measured(config: &TrainConfig, layout: Layout) -> Vec<BTreeMap<&'static str, f64>> {
    let data = Arc::new(RunData::load(config).unwrap());
    let config = Arc::new(config.clone());
    let ranks = run_threads(layout.world_size(), GroupOptions::default(), |world| {
        let groups = ProcessGroups::new(&world, layout)?;
        let sizes = BTreeMap::from([
            ("tp", groups.tp.size()),
            ("cp", groups.cp.size()),
            ("dp", groups.dp.size()),
            ("dp-cp", groups.dp_cp.size()),
            ("edp", groups.edp.size()),
            ("share", config.parallel.zero_ranks.unwrap_or(1)),
            (
                "copies",
                groups.dp_cp.size() / config.parallel.zero_ranks.unwrap_or(1),
            ),
        ]);
        let stage = groups.pp.rank();
        let device = Device::flex().autodiff();
        let mut trainer = Trainer::new(config.clone(), groups, device, data.clone())?;
        let key = |record: &FlightRecord| format!("{} {}", record.group, record.call);
        trainer.step()?;
        let before: Vec<_> = world.flight_records().iter().map(key).collect();
        trainer.step()?;
        let records = world.flight_records();
        let new: Vec<_> = records
            .iter()
            .filter(|record| !before.contains(&key(record)))
            .collect();
        // Otherwise some of the step's calls may have been dropped.
        assert!(new.len() < records.len(), "{} calls in a step", new.len());
        let mut found = BTreeMap::new();
        // What a rank receives from another stage is recorded too, as `pp 1 to 0` on rank 0.
        let is_received = |record: &FlightRecord| {
            let is_sent = record.group.starts_with(&format!("pp {stage} to "));
            record.group.starts_with("pp ") && !is_sent
        };
        for record in new.into_iter().filter(|record| !is_received(record)) {
            if let Some(axis) = axis(&record.group) {
                let ranks = sizes.get(record.group.as_str()).copied().unwrap_or(2);
                *found.entry(axis).or_default() += sent(record, ranks);
            }
        }
        Ok::<_, TrainError>(found)
    });
    ranks.into_iter().map(Result::unwrap).collect()
}

/// In addition to what is planned, ranks send the gradients of norms and numbers like the norm of
/// all gradients.
const SMALL: f64 = 0.03;

#[rstest]
#[case("tp2-sp", "train.global_batch=1")]
#[case("tp2", "train.global_batch=1")]
#[case("tp2-sp", "train.global_batch=1 train.fused_linear_cross_entropy=true")]
#[case("dp2", "parallel.zero=0")]
#[case("dp2", "parallel.zero=1")]
#[case("dp2", "parallel.zero=2")]
#[case("dp4", "parallel.zero=3 parallel.bucket_size=20000")]
#[case("dp4", "parallel.zero=1 parallel.zero_ranks=2")]
#[case("cp2", "train.global_batch=1 parallel.cp_comm=p2p")]
#[case("cp2", "train.global_batch=1 parallel.cp_comm=all_gather")]
#[case("pp2", "")]
#[case("tp2-pp2-sp", "train.global_batch=2")]
fn a_rank_sends_what_is_planned(#[case] layout: &str, #[case] sets: &str) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("text.txt");
    fs::write(&file, "It was the best of times. ".repeat(400)).unwrap();
    let layers = ConfigLayers::new().with_text("traffic", MODEL).unwrap();
    let layers = layers.with_data(&file.to_string_lossy()).unwrap();
    let layers = layers.with_layout(layout).unwrap();
    let set = |layers: ConfigLayers, set| layers.with_set(set).unwrap();
    let config = sets.split_whitespace().fold(layers, set).load().unwrap();
    let layout = config.layout(None).unwrap();
    let ranks = measured(&config, layout);
    let planned = plan(config, Gpu::H100);
    // Ranks of a stage follow each other, with the stage as the slowest axis.
    let of_stage = ranks.len() / layout.pp;
    for (stage, traffic) in planned.traffic.iter().enumerate() {
        let ranks = &ranks[stage * of_stage..(stage + 1) * of_stage];
        let axes = [
            ("tp", traffic.tp_bytes),
            ("cp", traffic.cp_bytes),
            ("dp", traffic.dp_bytes),
            ("pp", traffic.pp_bytes),
        ];
        for (axis, planned) in axes {
            let sum: f64 = ranks.iter().filter_map(|found| found.get(axis)).sum();
            let mean = sum / of_stage as f64;
            let off = (mean - planned).abs() / planned.max(mean).max(1.0);
            assert!(
                off < SMALL || mean.max(planned) < 1000.0,
                "{axis} of stage {stage}: {planned} planned, {mean} sent"
            );
        }
    }
}

/// All-to-alls record no shapes, so their bytes are those that were computed by hand.
#[rstest]
// 32 tokens on a rank. Queries, keys, values and outputs have 64, 32, 32 and 64 features in f32,
// and half of them go to the other rank, forward and backward, in 2 layers.
#[case("cp2", "parallel.cp_comm=a2a", [2.0 * 2.0 * 0.5 * 32.0 * 192.0 * 4.0, 0.0])]
// 16 tokens on a rank. The same between neighbours; then 2 x 32 features of keys and values go
// around two ranks: once forward, once backward, and two sums of gradients.
#[case("cp4", "parallel.cp_comm=a2a2+p2p", [2.0 * (2.0 * 0.5 * 16.0 * 192.0 * 4.0 + 4.0 * 16.0 * 64.0 * 4.0), 0.0])]
// 64 tokens on a rank, of which two rows of 64 features each go to one of two ranks: there and
// back, forward and backward, in 2 layers.
#[case("dp4-ep2", "model.family=mixtral model.experts.num=4", [0.0, 2.0 * 4.0 * 0.5 * 2.0 * 64.0 * 64.0 * 4.0])]
// With eight experts a token, a row goes once to each rank: 7 of 8 ranks are others.
#[case("dp8-ep8", "model.family=mixtral model.experts.num=8 model.experts.top_k=8", [0.0, 2.0 * 4.0 * 7.0 * 64.0 * 64.0 * 4.0])]
fn all_to_alls_send_what_was_computed_by_hand(
    #[case] layout: &str,
    #[case] sets: &str,
    #[case] sent: [f64; 2],
) {
    let planned = plan(config(MODEL, layout, 1, sets), Gpu::H100);
    let traffic = planned.traffic[0];
    assert_eq!([traffic.cp_bytes, traffic.ep_bytes], sent);
}
