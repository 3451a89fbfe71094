//! Experts are written by different ranks than dense parameters, and can be read under any layout.

use burn::tensor::{DType, TensorData};
use megaburn_checkpoint::{Checkpoint, NamedTensor, Retention, Snapshot, save};
use megaburn_collective::{GroupOptions, ProcessGroups, run_threads};
use megaburn_mesh::{Axis, FusedPart, Layout, ShardSpec};
use rstest::rstest;

use crate::model::{Random, names};

const NUM_EXPERTS: usize = 4;

/// The tensors of a rank: each of its experts has a split matrix and a replicated bias.
fn tensors(groups: &ProcessGroups) -> Vec<(String, ShardSpec)> {
    let coords = groups.coords;
    let layout = groups.layout();
    let split = |axis| {
        let rank = coords.get(axis);
        let ranks = layout.degree(axis);
        ShardSpec::split(&[3, 8], 1, &[FusedPart::new(8)], axis, rank, ranks).unwrap()
    };
    let whole = |axis| ShardSpec::whole(&[5], axis, coords.get(axis), layout.degree(axis));
    let mut tensors = vec![
        ("attention.weight".to_string(), split(Axis::Tp)),
        ("norm.gamma".to_string(), whole(Axis::Tp)),
    ];
    for expert in (0..NUM_EXPERTS).filter(|e| e * layout.ep / NUM_EXPERTS == coords.ep) {
        tensors.push((format!("experts.{expert}.up.weight"), split(Axis::Etp)));
        tensors.push((format!("experts.{expert}.up.bias"), whole(Axis::Etp)));
    }
    tensors
}

/// A rank's part of a tensor.
fn local(seed: u64, name: &str, shard: &ShardSpec) -> Vec<f32> {
    let of_name = |seed: u64, byte| seed.wrapping_mul(31).wrapping_add(u64::from(byte));
    let mut random = Random(name.bytes().fold(seed, of_name));
    let whole: Vec<f32> = (0..shard.num_global())
        .map(|_| random.below(1 << 20) as f32)
        .collect();
    let mut local = vec![0.0; shard.local_shape().iter().product()];
    for piece in &shard.pieces {
        shard.for_each_run(piece, |l, g, n| {
            local[l..l + n].copy_from_slice(&whole[g..g + n])
        });
    }
    local
}

#[rstest]
#[case("dp1")]
#[case("dp2")]
#[case("dp4-ep2")]
#[case("dp4-ep4")]
#[case("cp2-dp2-ep2")]
#[case("tp2-dp2-ep2-sp")]
#[case("tp2-dp2-ep4-sp")]
#[case("tp2-dp2-ep2-etp2-sp")]
#[case("dp4-etp2")]
fn experts_saved_under_one_layout_load_under_any(
    #[case] saved: &str,
    #[values("dp1", "dp2-ep2", "dp4-ep4", "tp2-dp2-ep2-etp2-sp", "tp2-etp2")] loaded: &str,
) {
    let seed = Random::fresh().next();
    let dir = tempfile::tempdir().unwrap();
    let layout: Layout = saved.parse().unwrap();
    let paths = run_threads(layout.world_size(), GroupOptions::default(), |world| {
        let groups = ProcessGroups::new(&world, layout)?;
        let mine = tensors(&groups);
        let named = mine.iter().map(|(name, shard)| {
            let values = local(seed, name, shard);
            let len = values.len();
            NamedTensor::new(name.clone(), shard, TensorData::new(values, [len]))
        });
        save(
            dir.path(),
            &Retention::newest(1),
            None,
            &groups,
            &Snapshot::default(),
            named,
        )
    });
    let paths: Vec<_> = paths.into_iter().map(Result::unwrap).collect();
    let files: Vec<_> = (0..layout.world_size())
        .map(|rank| format!("rank-{rank:05}.safetensors"))
        .collect();
    let found = names(&paths[0]);
    let found: Vec<_> = found
        .iter()
        .filter(|name| name.starts_with("rank"))
        .collect();
    assert!(found.into_iter().eq(&files), "every rank writes a share");

    let checkpoint = Checkpoint::open(&paths[0]).unwrap();
    checkpoint.verify().unwrap();
    assert_eq!(checkpoint.manifest().tensors.len(), 2 + 2 * NUM_EXPERTS);
    let layout: Layout = loaded.parse().unwrap();
    let ranks = run_threads(layout.world_size(), GroupOptions::default(), |world| {
        for (name, shard) in tensors(&ProcessGroups::new(&world, layout).unwrap()) {
            let read = checkpoint.read(&name, &shard, DType::F32)?;
            assert_eq!(
                read.as_slice::<f32>().unwrap(),
                local(seed, &name, &shard),
                "{name}"
            );
        }
        Ok::<_, megaburn_checkpoint::CheckpointError>(())
    });
    ranks.into_iter().for_each(|rank| rank.unwrap());
}
