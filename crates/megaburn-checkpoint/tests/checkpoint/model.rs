//! A model's tensors under any layout, whose values are a function of name and step.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use burn::tensor::{DType, TensorData};
use megaburn_checkpoint::{
    AsyncSave, Checkpoint, CheckpointError, NamedTensor, Place, Retention, Snapshot, prepare, save,
};
use megaburn_collective::{Group, GroupOptions, ProcessGroups, run_threads};
use megaburn_mesh::{Axis, FusedPart, Layout, ShardSpec, pad_vocab};
use serde_json::json;

pub(crate) struct Tensor {
    pub(crate) name: &'static str,
    pub(crate) dtype: DType,
    pub(crate) shard: ShardSpec,
}

/// The tensors of a rank under `tp`: a padded vocabulary (with different padding for each tp),
/// fused parts, replicated key/value heads, a replicated norm, and several element types.
pub(crate) fn tensors(rank: usize, tp: usize) -> Vec<Tensor> {
    let split = |shape: &[usize], dim, parts: &[FusedPart]| {
        ShardSpec::split(shape, dim, parts, Axis::Tp, rank, tp).unwrap()
    };
    let padded = pad_vocab(13, 4, tp);
    let vocab = ShardSpec::split_padded(&[13, 6], 0, padded, Axis::Tp, rank, tp).unwrap();
    let qkv = [
        FusedPart::units(8, 3),
        FusedPart::units(2, 4),
        FusedPart::units(2, 4),
    ];
    let norm = ShardSpec::whole(&[6], Axis::Tp, rank, tp);
    [
        ("model.embedding.weight", DType::F32, vocab.clone()),
        ("exp_avg.embedding.weight", DType::F32, vocab),
        (
            "model.layers.0.qkv.weight",
            DType::BF16,
            split(&[6, 40], 1, &qkv),
        ),
        (
            "model.layers.0.gate_up.weight",
            DType::F32,
            split(&[6, 32], 1, &[FusedPart::new(16); 2]),
        ),
        (
            "model.layers.0.down.weight",
            DType::F16,
            split(&[16, 6], 0, &[FusedPart::new(16)]),
        ),
        (
            "model.layers.0.cube",
            DType::I64,
            split(&[2, 8, 3], 1, &[FusedPart::new(8)]),
        ),
        ("model.norm.weight", DType::F64, norm),
    ]
    .map(|(name, dtype, shard)| Tensor { name, dtype, shard })
    .into()
}

/// The bytes of the global tensor at a step. All bit patterns occur, so that any conversion would
/// be noticed.
pub(crate) fn global_bytes(tensor: &Tensor, step: u64) -> Vec<u8> {
    let mut random =
        Random(step ^ (tensor.name.len() as u64) << 32 ^ tensor.name.as_bytes()[0] as u64);
    (0..tensor.shard.num_global() * tensor.dtype.size())
        .map(|_| random.next() as u8)
        .collect()
}

/// A rank's part of the tensor; padding is zero.
pub(crate) fn local_bytes(tensor: &Tensor, step: u64) -> Vec<u8> {
    let global = global_bytes(tensor, step);
    let size = tensor.dtype.size();
    let mut local = vec![0; tensor.shard.local_shape().iter().product::<usize>() * size];
    for piece in &tensor.shard.pieces {
        tensor.shard.for_each_run(piece, |l, g, n| {
            local[l * size..(l + n) * size].copy_from_slice(&global[g * size..(g + n) * size]);
        });
    }
    local
}

pub(crate) fn named(tensor: &Tensor, step: u64) -> NamedTensor<'_> {
    let data = local_bytes(tensor, step);
    let data = TensorData::from_bytes_vec(data, tensor.shard.local_shape(), tensor.dtype);
    NamedTensor::new(tensor.name, &tensor.shard, data)
}

pub(crate) fn snapshot(step: u64) -> Snapshot {
    let model = json!({"hidden": 6});
    let trainer = json!({"samples": step * 8, "lr": 0.1});
    Snapshot {
        run_id: None,
        step,
        model,
        trainer,
    }
}

/// Saves as one rank of a layout.
pub(crate) fn save_rank(
    place: impl Into<Place>,
    keep: usize,
    step: u64,
    groups: &ProcessGroups,
) -> Result<PathBuf, CheckpointError> {
    let tensors = tensors(groups.tp.rank(), groups.tp.size());
    save(
        place,
        &Retention::newest(keep),
        None,
        groups,
        &snapshot(step),
        tensors.iter().map(|tensor| named(tensor, step)),
    )
}

/// Like [`save_rank`], asynchronously.
pub(crate) fn begin_rank(
    place: impl Into<Place>,
    keep: usize,
    step: u64,
    groups: &ProcessGroups,
) -> Result<AsyncSave, CheckpointError> {
    let tensors = tensors(groups.tp.rank(), groups.tp.size());
    let named = tensors.iter().map(|tensor| named(tensor, step));
    let retention = Retention::newest(keep);
    AsyncSave::begin(place, &retention, None, groups, snapshot(step), named)
}

/// Saves as all ranks of a layout.
pub(crate) fn save_as(dir: &Path, keep: usize, step: u64, layout: &str) -> PathBuf {
    let layout: Layout = layout.parse().unwrap();
    let ranks = run_threads(layout.world_size(), GroupOptions::default(), |world| {
        prepare(dir, &world)?;
        save_rank(dir, keep, step, &ProcessGroups::new(&world, layout)?)
    });
    let paths: Vec<_> = ranks.into_iter().map(Result::unwrap).collect();
    assert!(paths.iter().all(|path| *path == paths[0]));
    paths[0].clone()
}

/// Checks every tensor bit for bit, as each rank of `tp` reads it.
pub(crate) fn check(checkpoint: &Checkpoint, step: u64, tp: usize) {
    assert_eq!(checkpoint.step(), step);
    assert_eq!(checkpoint.trainer(), &snapshot(step).trainer);
    for tensor in (0..tp).flat_map(|rank| tensors(rank, tp)) {
        let read = checkpoint
            .read(tensor.name, &tensor.shard, tensor.dtype)
            .unwrap();
        assert_eq!(
            read.shape().to_vec(),
            tensor.shard.local_shape(),
            "{}",
            tensor.name
        );
        assert_eq!(
            read.as_bytes(),
            local_bytes(&tensor, step),
            "{}",
            tensor.name
        );
    }
}

/// The names in a folder.
pub(crate) fn names(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

pub(crate) fn alone() -> Group {
    Group::single(0)
}

/// The splitmix64 generator.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// Seeds differently in every run; the seed is printed so that a failure can be reproduced.
    pub(crate) fn fresh() -> Self {
        let seed = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap()
            .as_nanos() as u64;
        println!("seed {seed}");
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}
