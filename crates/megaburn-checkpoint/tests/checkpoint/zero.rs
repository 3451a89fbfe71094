//! Weights and moments that ranks keep as the stages of ZeRO divide them, on hosts with a folder each.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    ops::Range,
    path::{Path, PathBuf},
};

use burn::tensor::{DType, TensorData};
use megaburn_checkpoint::{
    CheckpointError, Copies, Latest, Manifest, NamedTensor, NeededChunks, PieceInfo, Retention,
    TensorInfo, find_latest, save,
};
use megaburn_collective::{ProcessGroups, RankFailure};
use megaburn_mesh::{Axis, FusedPart, ShardSpec};

use crate::{
    cluster::Cluster,
    model::{Tensor, local_bytes, named, names, snapshot},
};

/// Bytes of a chunk, so that small pieces have several.
pub(crate) const CHUNK: usize = 256;

/// Two weights that are split along different dimensions, and their moments.
fn state(tp_rank: usize, tp: usize) -> Vec<Tensor> {
    let split = |shape: &[usize], dim: usize| {
        let parts = [FusedPart::new(shape[dim])];
        ShardSpec::split(shape, dim, &parts, Axis::Tp, tp_rank, tp).unwrap()
    };
    let (column, row) = (split(&[24, 36], 0), split(&[20, 24], 1));
    let tensor = |(name, dtype, shard)| Tensor { name, dtype, shard };
    let all = [
        ("model.fc1", DType::F32, column.clone()),
        ("model.fc2.w", DType::BF16, row.clone()),
        ("exp_avg.fc1", DType::F32, column),
        ("exp_avg.fc2.w", DType::F32, row),
    ];
    all.map(tensor).into()
}

/// The range of a tensor that a data-parallel rank keeps with a ZeRO stage.
fn kept(tensor: &Tensor, zero: u8, dp_rank: usize, dp: usize) -> Range<usize> {
    let len: usize = tensor.shard.local_shape().iter().product();
    let is_sharded = zero
        >= if tensor.name.starts_with("model") {
            3
        } else {
            1
        };
    if is_sharded {
        len * dp_rank / dp..len * (dp_rank + 1) / dp
    } else {
        0..len
    }
}

pub(crate) fn save_zero(cluster: &Cluster, zero: u8, keep: usize, step: u64) {
    let ranks = cluster.run(|place, groups| {
        let tensors = state(groups.tp.rank(), groups.tp.size());
        let (dp_rank, dp) = (groups.dp_cp.rank(), groups.dp_cp.size());
        let named = tensors.iter().map(|tensor| {
            let range = kept(tensor, zero, dp_rank, dp);
            let bytes = local_bytes(tensor, step);
            let size = tensor.dtype.size();
            if range.len() * size == bytes.len() {
                return named(tensor, step);
            }
            let values = move |range: Range<usize>| {
                let bytes = bytes[range.start * size..range.end * size].to_vec();
                let data = TensorData::from_bytes_vec(bytes, [range.len()], tensor.dtype);
                Ok(Box::new(move || Ok(data)) as _)
            };
            NamedTensor::ranged(tensor.name, &tensor.shard, tensor.dtype, values)
                .holding(range, Copies { index: 0, count: 1 })
        });
        let retention = Retention::newest(keep);
        save(place, &retention, None, groups, &snapshot(step), named)
    });
    ranks.into_iter().for_each(|rank| drop(rank.unwrap()));
}

/// The step that a rank has loaded and the bytes that came from other hosts; `None` without a
/// checkpoint.
pub(crate) type Loaded = Result<Option<(u64, u64)>, RankFailure<CheckpointError>>;

/// Fetches what a rank reads of the newest checkpoint, calls `between` before that, reads it and
/// compares it.
pub(crate) fn try_load(
    cluster: &Cluster,
    zero: u8,
    between: impl Fn(&ProcessGroups) + Sync,
) -> Vec<Loaded> {
    cluster.run(|place, groups| {
        let Latest { checkpoint, .. } = find_latest(place, &groups.world)?;
        let Some(mut checkpoint) = checkpoint else {
            return Ok(None);
        };
        let step = checkpoint.step();
        let (dp_rank, dp) = (groups.dp_cp.rank(), groups.dp_cp.size());
        let tensors = state(groups.tp.rank(), groups.tp.size());
        let mut needed = NeededChunks::default();
        for tensor in &tensors {
            let range = kept(tensor, zero, dp_rank, dp);
            checkpoint.add_needed(&mut needed, tensor.name, &tensor.shard, range);
        }
        between(groups);
        let bytes = checkpoint.fetch(place, &groups.world, &needed)?;
        for tensor in &tensors {
            let range = kept(tensor, zero, dp_rank, dp);
            let size = tensor.dtype.size();
            let expected = &local_bytes(tensor, step)[range.start * size..range.end * size];
            let read = checkpoint.read_range(tensor.name, &tensor.shard, range, tensor.dtype)?;
            assert_eq!(read.as_bytes(), expected, "{}", tensor.name);
        }
        Ok(Some((step, bytes)))
    })
}

/// The step that is loaded, and the bytes that each host fetched.
pub(crate) fn load(cluster: &Cluster, zero: u8) -> Option<(u64, Vec<u64>)> {
    let ranks = try_load(cluster, zero, |_| {})
        .into_iter()
        .map(Result::unwrap);
    let ranks: Option<Vec<(u64, u64)>> = ranks.collect();
    let ranks = ranks?;
    let mut of_host = vec![0; cluster.num_hosts()];
    for (rank, (_, bytes)) in ranks.iter().enumerate() {
        of_host[cluster.hosts[rank]] += bytes;
    }
    Some((ranks[0].0, of_host))
}

pub(crate) fn folders(cluster: &Cluster, step: u64) -> Vec<PathBuf> {
    let hosts = 0..cluster.num_hosts();
    hosts
        .map(|host| cluster.folder(host).join(format!("step-{step:08}")))
        .collect()
}

/// The files with fetched chunks in a folder.
pub(crate) fn fetched_in(folder: &Path) -> Vec<PathBuf> {
    let names = names(folder).into_iter();
    let names = names.filter(|name| name.ends_with(".safetensors.fetched"));
    names.map(|name| folder.join(name)).collect()
}

/// The places in the full tensor of the elements that a piece stores.
fn elements(piece: &PieceInfo, info: &TensorInfo) -> Vec<usize> {
    let shape = &info.global_shape;
    let mut slice = shape.clone();
    slice[piece.dim] = piece.range.len();
    let all = 0..slice.iter().product();
    let stored = piece.elements.clone().unwrap_or(all);
    let place = |mut element: usize| {
        let (mut at, mut stride) = (0, 1);
        for dim in (0..shape.len()).rev() {
            let first = if dim == piece.dim {
                piece.range.start
            } else {
                0
            };
            at += (element % slice[dim] + first) * stride;
            element /= slice[dim];
            stride *= shape[dim];
        }
        at
    };
    stored.map(place).collect()
}

/// The bytes that each host lacks, counted element by element: chunks with an element that a rank
/// of the host reads, and the headers of files with such chunks.
pub(crate) fn expected(cluster: &Cluster, zero: u8, step: u64) -> Vec<u64> {
    let (tp, world) = (cluster.layout.tp, cluster.hosts.len());
    let text = fs::read(folders(cluster, step)[0].join("manifest.json")).unwrap();
    let manifest: Manifest = serde_json::from_slice(&text).unwrap();
    let of_host = |host: usize| {
        let mut read: BTreeMap<&str, BTreeSet<usize>> = BTreeMap::new();
        // Tensor-parallel ranks are neighbours, and there is only data parallelism next to it.
        for rank in (0..world).filter(|rank| cluster.hosts[*rank] == host) {
            for tensor in state(rank % tp, tp) {
                let range = kept(&tensor, zero, rank / tp, world / tp);
                let places = read.entry(tensor.name).or_default();
                for piece in &tensor.shard.pieces {
                    tensor.shard.for_each_run(piece, |local, global, len| {
                        let is_kept = |i: &usize| range.contains(&(local + i));
                        places.extend((0..len).filter(is_kept).map(|i| global + i));
                    });
                }
            }
        }
        let on_host = cluster.ranks_on(host, step);
        let mut bytes = 0;
        for (rank, file) in manifest.files.iter().enumerate() {
            assert!(file.name.contains(&format!("{rank:05}")));
            let (mut in_tensors, mut of_file) = (0, 0);
            for piece in &file.pieces {
                let info = &manifest.tensors[&piece.tensor];
                let size = info.dtype.bitsize() / 8;
                let elements = elements(piece, info);
                in_tensors += (elements.len() * size) as u64;
                let is_read = |place: &usize| read[piece.tensor.as_str()].contains(place);
                let chunks = elements.chunks(CHUNK / size);
                let chunks = chunks.filter(|chunk| chunk.iter().any(is_read));
                of_file += chunks.map(|chunk| (chunk.len() * size) as u64).sum::<u64>();
            }
            if !on_host.contains(&rank) && of_file > 0 {
                bytes += of_file + file.bytes - in_tensors;
            }
        }
        bytes
    };
    (0..cluster.num_hosts()).map(of_host).collect()
}
