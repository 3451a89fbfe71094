use burn::tensor::{DType, TensorData};
use megaburn_checkpoint::{Checkpoint, NamedTensor, Retention, Snapshot, find_latest, save};
use megaburn_collective::{GroupOptions, ProcessGroups, run_threads};
use megaburn_mesh::{Axis, FusedPart, Layout, ShardSpec};
use rstest::rstest;

use crate::model::{alone, check, local_bytes, names, save_as, tensors};

#[rstest]
fn saved_under_one_layout_it_loads_bit_for_bit_under_any(
    #[values("dp1", "tp2", "tp4", "tp8", "dp3", "tp2-cp2-dp2")] saved: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let path = save_as(dir.path(), 2, 120, saved);
    assert_eq!(path, dir.path().join("step-00000120"));
    for tp in [1, 2, 4, 8] {
        check(&Checkpoint::open(&path).unwrap(), 120, tp);
    }
    let latest = find_latest(dir.path(), &alone()).unwrap();
    assert!(latest.refused.is_empty());
    let checkpoint = latest.checkpoint.unwrap();
    checkpoint.verify().unwrap();
    assert_eq!(
        checkpoint.manifest().layout,
        saved.parse::<Layout>().unwrap().to_string()
    );
}

/// All elements as f64, which represents floats of every type exactly.
fn widened(data: TensorData) -> Vec<f64> {
    data.convert_dtype(DType::F64).try_to_vec().unwrap()
}

#[rstest]
fn floats_load_as_other_floats_under_any_layout(
    #[values("dp1", "tp2", "tp4")] saved: &str,
    #[values(DType::F64, DType::F32)] wanted: DType,
) {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&save_as(dir.path(), 1, 9, saved)).unwrap();
    let mut cast = 0;
    for tensor in [1, 2, 4]
        .into_iter()
        .flat_map(|tp| (0..tp).flat_map(move |r| tensors(r, tp)))
    {
        assert_eq!(checkpoint.dtype(tensor.name).unwrap(), tensor.dtype);
        let shape = &tensor.shard.global_shape;
        assert_eq!(checkpoint.global_shape(tensor.name).unwrap(), shape);
        let read = checkpoint.read(tensor.name, &tensor.shard, wanted);
        if tensor.dtype == DType::I64 {
            assert!(
                read.unwrap_err()
                    .to_string()
                    .contains("is I64, but must be")
            );
            continue;
        }
        let read = read.unwrap();
        assert_eq!(read.dtype(), wanted);
        assert_eq!(read.shape().to_vec(), tensor.shard.local_shape());
        let local = local_bytes(&tensor, 9);
        let local = TensorData::from_bytes_vec(local, read.shape().to_vec(), tensor.dtype);
        for (a, b) in widened(read)
            .into_iter()
            .zip(widened(local.convert_dtype(wanted)))
        {
            assert!(
                a == b || (a.is_nan() && b.is_nan()),
                "{}: {a} {b}",
                tensor.name
            );
        }
        cast += usize::from(tensor.dtype != wanted);
    }
    // Casts per rank, of its seven tensors; there are seven ranks in total.
    assert_eq!(cast, 7 * if wanted == DType::F64 { 5 } else { 3 });
}

/// A tensor may be loaded along another dimension than it was saved.
#[rstest]
#[case(2, 0, 2, 1)]
#[case(3, 1, 2, 0)]
#[case(1, 0, 3, 2)]
fn a_tensor_loads_along_another_dimension(
    #[case] saved: usize,
    #[case] saved_dim: usize,
    #[case] loaded: usize,
    #[case] loaded_dim: usize,
) {
    let shape = [6, 6, 6];
    let cut = |dim, rank, ranks| {
        ShardSpec::split(&shape, dim, &[FusedPart::new(6)], Axis::Tp, rank, ranks).unwrap()
    };
    let whole: Vec<f32> = (0..216).map(|i| i as f32).collect();
    let local = |shard: &ShardSpec| {
        let mut local = vec![0.0f32; shard.local_shape().iter().product()];
        shard.for_each_run(&shard.pieces[0], |l, g, n| {
            local[l..l + n].copy_from_slice(&whole[g..g + n]);
        });
        local
    };
    let dir = tempfile::tempdir().unwrap();
    let layout: Layout = format!("tp{saved}").parse().unwrap();
    let ranks = run_threads(saved, GroupOptions::default(), |world| {
        let groups = ProcessGroups::new(&world, layout)?;
        let shard = cut(saved_dim, world.rank(), saved);
        let values = local(&shard);
        let data = TensorData::new(values, [36 * 6 / saved]);
        let tensor = NamedTensor::new("w", &shard, data);
        save(
            dir.path(),
            &Retention::newest(1),
            None,
            &groups,
            &Snapshot::default(),
            [tensor],
        )
    });
    let path = ranks.into_iter().map(Result::unwrap).next().unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    for rank in 0..loaded {
        let shard = cut(loaded_dim, rank, loaded);
        let read = checkpoint.read("w", &shard, DType::F32).unwrap();
        assert_eq!(read.as_slice::<f32>().unwrap(), local(&shard));
    }
}

#[test]
fn saving_keeps_the_newest_and_replaces_the_same_step() {
    let dir = tempfile::tempdir().unwrap();
    for step in [1, 2, 3, 3] {
        save_as(dir.path(), 2, step, "tp2");
    }
    assert_eq!(names(dir.path()), ["step-00000002", "step-00000003"]);
    check(
        &find_latest(dir.path(), &alone())
            .unwrap()
            .checkpoint
            .unwrap(),
        3,
        2,
    );
}
