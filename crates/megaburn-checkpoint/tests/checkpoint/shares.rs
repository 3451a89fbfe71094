use std::{fs, ops::Range};

use burn::tensor::{DType, TensorData};
use megaburn_checkpoint::{Checkpoint, Copies, NamedTensor, Retention, Snapshot, save};
use megaburn_collective::{GroupOptions, ProcessGroups, run_threads};
use megaburn_mesh::{Axis, FusedPart, Layout, ShardSpec};
use rstest::rstest;

use crate::model::{Random, check, local_bytes, names, save_as, tensors};

#[test]
fn every_rank_writes_a_share_and_replicated_pieces_are_cut_into_plain_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let path = save_as(dir.path(), 2, 1, "tp2-dp2");
    let files = (0..4).map(|rank| format!("rank-{rank:05}.safetensors"));
    let manifest = ["manifest.json", "manifest.xxh3"].map(String::from);
    assert!(manifest.into_iter().chain(files).eq(names(&path)));
    let checkpoint = Checkpoint::open(&path).unwrap();
    let files = &checkpoint.manifest().files;
    let pieces: Vec<_> = files.iter().flat_map(|file| &file.pieces).collect();
    let parts: Vec<_> = pieces
        .iter()
        .filter(|piece| piece.elements.is_some())
        .collect();
    assert!(!parts.is_empty() && parts.len() < pieces.len());
    // The files are plain safetensors: any reader sees the pieces.
    for file in files {
        let bytes = fs::read(path.join(&file.name)).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for piece in &file.pieces {
            let view = tensors.tensor(&piece.key).unwrap();
            match &piece.elements {
                Some(elements) => assert_eq!(view.shape(), [elements.len()]),
                None => assert_eq!(view.shape()[piece.dim], piece.range.len()),
            }
        }
    }
}

/// Tensors that are cut over the ranks of the data-parallel group, as ZeRO cuts optimizer states,
/// at random places, with and without copies.
#[rstest]
fn sharded_states_are_written_by_their_holders_and_load_under_any_layout(
    #[values("dp1", "tp2-dp2", "dp4", "tp2-cp2-dp2", "tp4-dp2")] saved: &str,
    #[values(1, 2)] copies: usize,
) {
    let dir = tempfile::tempdir().unwrap();
    let layout: Layout = saved.parse().unwrap();
    let seed = Random::fresh().next();
    let paths = run_threads(layout.world_size(), GroupOptions::default(), |world| {
        let groups = ProcessGroups::new(&world, layout)?;
        let group = &groups.dp_cp;
        let copies = copies.min(group.size());
        let num_shards = group.size() / copies;
        let tensors = tensors(groups.tp.rank(), groups.tp.size());
        let named = tensors.iter().enumerate().map(|(number, tensor)| {
            let size = tensor.dtype.size();
            let len = local_bytes(tensor, 5).len() / size;
            let range = cut(seed ^ number as u64, len, group.rank() / copies, num_shards);
            let held = Copies {
                index: group.rank() % copies,
                count: copies,
            };
            let name = tensor.name;
            let own = range.clone();
            NamedTensor::ranged(name, &tensor.shard, tensor.dtype, move |range| {
                assert!(own.start <= range.start && range.end <= own.end, "{name}");
                let bytes = local_bytes(tensor, 5)[range.start * size..range.end * size].to_vec();
                let data = TensorData::from_bytes_vec(bytes, [range.len()], tensor.dtype);
                Ok(Box::new(move || Ok(data)))
            })
            .holding(range, held)
        });
        let snapshot = crate::model::snapshot(5);
        save(
            dir.path(),
            &Retention::newest(1),
            None,
            &groups,
            &snapshot,
            named,
        )
    });
    let path = paths.into_iter().map(Result::unwrap).next().unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    checkpoint.verify().unwrap();
    for tp in [1, 2, 4] {
        check(&checkpoint, 5, tp);
    }
    // Ranges of them, too.
    let mut random = Random(seed);
    for tensor in (0..2).flat_map(|rank| tensors(rank, 2)) {
        let local = local_bytes(&tensor, 5);
        let size = tensor.dtype.size();
        for _ in 0..8 {
            let [a, b] = [(); 2].map(|()| random.below((local.len() / size + 1) as u64) as usize);
            let range = a.min(b)..a.max(b);
            let read = checkpoint
                .read_range(tensor.name, &tensor.shard, range.clone(), tensor.dtype)
                .unwrap();
            assert_eq!(read.shape().to_vec(), [range.len()]);
            assert_eq!(
                read.as_bytes(),
                &local[range.start * size..range.end * size]
            );
        }
    }
}

/// Range `index` of `count` ranges of `len` elements, of random lengths, some of them empty.
fn cut(seed: u64, len: usize, index: usize, count: usize) -> Range<usize> {
    let mut random = Random(seed);
    let mut cuts: Vec<_> = (1..count)
        .map(|_| random.below(len as u64 + 1) as usize)
        .collect();
    cuts.extend([0, len]);
    cuts.sort_unstable();
    cuts[index]..cuts[index + 1]
}

/// What each rank writes differs by less than 1% in a model of a few megabytes, most of it
/// replicated over data-parallel ranks, and the rest over tensor-parallel ranks too.
#[rstest]
fn shares_are_even(#[values("tp2-dp3", "tp4-dp2", "dp5", "tp2-cp2-dp2")] layout: &str) {
    let dir = tempfile::tempdir().unwrap();
    let layout: Layout = layout.parse().unwrap();
    let paths = run_threads(layout.world_size(), GroupOptions::default(), |world| {
        let groups = ProcessGroups::new(&world, layout)?;
        let (rank, tp) = (groups.tp.rank(), groups.tp.size());
        let heads = [
            FusedPart::units(64, 16),
            FusedPart::units(2, 16),
            FusedPart::units(2, 16),
        ];
        let shards = [
            ShardSpec::split(&[300, 1088], 1, &heads, Axis::Tp, rank, tp).unwrap(),
            ShardSpec::split(&[1024, 300], 0, &[FusedPart::new(1024)], Axis::Tp, rank, tp).unwrap(),
            ShardSpec::whole(&[100_000], Axis::Tp, rank, tp),
        ];
        let named = shards.iter().enumerate().map(|(number, shard)| {
            let shape = shard.local_shape();
            let data = TensorData::full(shape, number as f32);
            NamedTensor::new(format!("w{number}"), shard, data)
        });
        let keep = Retention::newest(1);
        save(
            dir.path(),
            &keep,
            None,
            &groups,
            &Snapshot::default(),
            named,
        )
    });
    let path = paths.into_iter().map(Result::unwrap).next().unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let sizes: Vec<_> = checkpoint
        .manifest()
        .files
        .iter()
        .map(|file| file.bytes)
        .collect();
    assert_eq!(sizes.len(), layout.world_size());
    let (least, most) = (*sizes.iter().min().unwrap(), *sizes.iter().max().unwrap());
    assert!(most - least < most / 100, "{sizes:?}");
    let shard = ShardSpec::whole(&[100_000], Axis::Tp, 0, 1);
    let read = checkpoint.read("w2", &shard, DType::F32).unwrap();
    assert!(read.as_slice::<f32>().unwrap().iter().all(|x| *x == 2.0));
}
