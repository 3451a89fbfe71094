use std::{cell::Cell, fs, panic::AssertUnwindSafe};

use burn::tensor::DType;
use megaburn_mesh::{Axis, FusedPart, ShardSpec};
use proptest::prelude::*;
use rstest::rstest;
use xxhash_rust::xxh3::xxh3_64;

use super::*;
use crate::{
    dtype, piece_index::PieceIndex, safetensors_file::SafetensorsFile, write_plan::WrittenPiece,
};

static NEVER: AtomicBool = AtomicBool::new(false);

/// Random bits that are finite numbers of any type.
fn finite_bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
        (state >> 56) as u8 & 0x3F
    };
    (0..len).map(|_| next()).collect()
}

/// A tensor of which `range` of each piece is written.
fn planned(
    name: String,
    dtype: DType,
    shard: ShardSpec,
    range: impl Fn(usize) -> Range<usize>,
    seed: u64,
) -> PlannedTensor<TensorData> {
    let len: usize = shard.local_shape().iter().product();
    let data = finite_bytes(len * dtype.size(), seed);
    let written = |(piece, part)| {
        let len = PieceIndex::new(&shard, part).len();
        let range = range(len);
        let is_full = range == (0..len);
        (!range.is_empty()).then_some(WrittenPiece {
            piece,
            range,
            is_full,
        })
    };
    let pieces = shard.pieces.iter().enumerate().filter_map(written);
    let plan = TensorPlan {
        name,
        dtype,
        file_dtype: dtype::to_file(dtype).unwrap(),
        must_be_finite: true,
        pieces: pieces.collect(),
        range: 0..len,
        shard,
    };
    let values = TensorData::from_bytes_vec(data, [len], dtype);
    PlannedTensor { plan, values }
}

/// A full tensor of bytes.
fn flat(number: usize, len: usize) -> PlannedTensor<TensorData> {
    let shard = ShardSpec::whole(&[len], Axis::Tp, 0, 1);
    let name = format!("t{number:03}");
    planned(name, DType::U8, shard, |len| 0..len, number as u64)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// The file has the bytes of each piece, however they lie in memory, and the hashes are of these
    /// bytes.
    #[test]
    fn a_file_has_the_bytes_of_its_pieces_and_their_hashes(
        sizes in prop::collection::vec((1usize..6, 1usize..300, 1usize..9), 1..12),
        dtypes in prop::collection::vec(
            prop::sample::select(vec![DType::F64, DType::F32, DType::BF16, DType::U8]), 12
        ),
        (ranks, cut) in (1usize..4, 0usize..3),
        seed in any::<u64>(),
    ) {
        let tensors: Vec<_> = sizes.iter().zip(&dtypes).enumerate().map(|(number, (size, dtype))| {
            let &(outer, a, b) = size;
            let parts = [FusedPart::new(a * ranks), FusedPart::new(b * ranks)];
            let shape = [outer, (a + b) * ranks];
            let shard = ShardSpec::split(&shape, 1, &parts, Axis::Tp, ranks - 1, ranks).unwrap();
            let range = |len: usize| len * cut / 4..len;
            planned(format!("t{number}"), *dtype, shard, range, seed ^ number as u64)
        }).collect();
        let mut expected = Vec::new();
        for PlannedTensor { plan, values } in &tensors {
            for written in &plan.pieces {
                let mut bytes = Vec::new();
                let size = plan.dtype.size();
                let index = PieceIndex::new(&plan.shard, &plan.shard.pieces[written.piece]);
                index.for_each_run(written.range.clone(), |local, len| {
                    bytes.extend_from_slice(&values.as_bytes()[local * size..][..len * size]);
                });
                expected.push((plan.piece_info(written).key, bytes));
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let read = |values, _| Ok(values);
        let file = write_rank_file(dir.path(), "file", tensors, read, &Progress::none(), &NEVER);
        let file = file.unwrap().unwrap();
        let path = dir.path().join("file");
        let all = fs::read(&path).unwrap();
        prop_assert_eq!((file.bytes, file.xxh3), (all.len() as u64, hex(xxh3_64(&all))));
        prop_assert_eq!(file.pieces.len(), expected.len());
        let opened = SafetensorsFile::open(&path).unwrap();
        for (key, bytes) in expected {
            let stored = opened.stored(opened.info(&key).unwrap());
            let mut found = vec![0; bytes.len()];
            stored.file.read_at(&mut found, stored.start).unwrap();
            prop_assert!(found == bytes, "{}", key);
            let piece = file.pieces.iter().find(|piece| piece.key == key).unwrap();
            prop_assert_eq!(&piece.chunks, &[hex(xxh3_64(&bytes))]);
        }
    }
}

/// The stage that fails, and a part of the error.
#[rstest]
#[case("values", "the disk is on fire")]
#[case("length", "it has 1 elements, but its shard has")]
#[case("numbers", "`t008` has values that are not finite")]
#[case("hasher", "the thread `checkpoint-hasher` panicked")]
#[cfg_attr(target_os = "linux", case("file", "cannot write /dev/full"))]
#[case("cancelled", "the save was given up")]
fn a_failure_of_a_stage_ends_the_others(
    #[case] kind: &str,
    #[case] expected: &str,
    #[values(2, 20_001)] len: usize,
    #[values(1, 50_000)] limit: usize,
) {
    const NUM: usize = 200;
    let dir = tempfile::tempdir().unwrap();
    let path = match kind {
        "file" => Path::new("/dev/full").to_path_buf(),
        _ => dir.path().join("file"),
    };
    let mut tensors: Vec<_> = (0..NUM).map(|number| flat(number, len)).collect();
    let bad = &mut tensors[8];
    match kind {
        "length" => bad.values = TensorData::from([1u8]),
        "numbers" => {
            bad.plan.dtype = DType::F32;
            let mut values = vec![1.0f32; len];
            values[len - 1] = f32::NAN;
            bad.values = TensorData::new(values, [len]);
        }
        // A piece that lies beyond its tensor.
        "hasher" => bad.plan.pieces[0].range = len..len + 1,
        _ => {}
    }
    let num_reads = Cell::new(0);
    let read = |values, plan: &TensorPlan| {
        num_reads.set(num_reads.get() + 1);
        match (kind, plan.name.as_str()) {
            ("values", "t008") => Err(CheckpointError::Source {
                name: plan.name.clone(),
                why: "the disk is on fire".into(),
            }),
            _ => Ok(values),
        }
    };
    let flag = AtomicBool::new(kind == "cancelled");
    let budget = Budget::new(limit);
    let hasher = FileHasher::new(&[]);
    let file = DataFile::create(&path, &[]).unwrap().cancelled_by(&flag);
    let failed = pipeline::run(tensors, read, &budget, hasher, file).and_then(|(_, file)| {
        // Bytes that are still in a buffer fail now.
        file.finish()
    });
    let error = failed.err().unwrap().to_string();
    assert!(error.contains(expected), "{error}");
    if len * NUM > 16 * limit && kind != "file" {
        assert!(
            num_reads.get() < NUM,
            "{} tensors were read",
            num_reads.get()
        );
    }
    assert!(budget.peak() <= limit.max(4 * len), "{}", budget.peak());
}

/// As when a device's values cannot be copied: the panic continues in the thread that reads.
#[test]
fn a_panic_while_values_are_read_ends_the_threads() {
    let dir = tempfile::tempdir().unwrap();
    let tensors = (0..9).map(|number| flat(number, 1000)).collect();
    let read = |values, _| match dir.path().join("file").exists() {
        true => panic!("a panic of a test"),
        false => Ok(values),
    };
    let write = || write_rank_file(dir.path(), "file", tensors, read, &Progress::none(), &NEVER);
    assert!(std::panic::catch_unwind(AssertUnwindSafe(write)).is_err());
}

#[rstest]
fn tensors_in_memory_are_within_the_limit_or_one(#[values(1, 2_500, 7_000)] limit: usize) {
    let dir = tempfile::tempdir().unwrap();
    let lens = [1000, 1, 3000, 900, 0, 5001, 10];
    let tensors = (0..60).map(|number| flat(number, lens[number % lens.len()]));
    let budget = Budget::new(limit);
    let hasher = FileHasher::new(b"start");
    let file = DataFile::create(&dir.path().join("file"), b"start").unwrap();
    let read = |values, _: &TensorPlan| Ok(values);
    let done = pipeline::run(tensors.collect(), read, &budget, hasher, file).unwrap();
    let (hash, chunks) = done.0.finish();
    let num_bytes = done.1.finish().unwrap();
    let all = fs::read(dir.path().join("file")).unwrap();
    assert_eq!((num_bytes, hash), (all.len() as u64, xxh3_64(&all)));
    let num_full = (0..60)
        .filter(|number| lens[number % lens.len()] > 0)
        .count();
    assert_eq!(chunks.len(), num_full);
    assert!(budget.peak() <= limit.max(5001), "{}", budget.peak());
    assert!(budget.peak() >= 5001);
}
