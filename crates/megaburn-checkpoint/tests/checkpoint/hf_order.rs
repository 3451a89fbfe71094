//! A published tensor whose columns are in another order than the parameter's.

use std::ops::Range;

use burn::tensor::{DType, TensorData};
use megaburn_checkpoint::{
    Checkpoint, CheckpointError, HfDir, HfEntry, HfView, NamedTensor, Snapshot, TensorSource,
    hf::StackedRows, save_single,
};
use megaburn_mesh::{Axis, FusedPart, ShardSpec};
use rstest::rstest;

use crate::{
    model::Random,
    published::{Stored, assembled, cut, publish_sharded},
};

/// A parameter `[.., queries | keys | values]`, which one tensor stores in another order.
struct Param {
    name: &'static str,
    outer: Vec<usize>,
    transposed: bool,
    columns: Vec<Range<usize>>,
    units: Vec<FusedPart>,
}

impl Param {
    fn shape(&self) -> Vec<usize> {
        let width = self.columns.iter().map(Range::len).sum();
        self.outer.iter().copied().chain([width]).collect()
    }

    fn spec(&self, rank: usize, tp: usize) -> ShardSpec {
        let dim = self.outer.len();
        ShardSpec::split(&self.shape(), dim, &self.units, Axis::Tp, rank, tp).unwrap()
    }

    fn stored(&self, dtype: DType, random: &mut Random) -> Stored {
        let mut shape = self.shape();
        if let (true, [.., a, b]) = (self.transposed, shape.as_mut_slice()) {
            std::mem::swap(a, b);
        }
        Stored::random(self.name, dtype, &shape, random)
    }

    /// The whole parameter, made of the tensor element by element.
    fn whole(&self, stored: &Stored) -> Vec<u8> {
        let size = stored.dtype.size();
        let width = *self.shape().last().unwrap();
        let in_order = assembled(&[stored], self.transposed, &self.shape());
        let mut whole = vec![0; in_order.len()];
        for (row, line) in in_order.chunks(width * size).enumerate() {
            let columns = self.columns.iter().cloned().flatten();
            for (element, column) in line.chunks(size).zip(columns) {
                let at = (row * width + column) * size;
                whole[at..at + size].copy_from_slice(element);
            }
        }
        whole
    }
}

/// Parameters of every kind, with groups of heads in order and with ranges in any order.
fn params(random: &mut Random) -> Vec<Param> {
    let mut size = |max| 1 + random.below(max) as usize;
    let (head, shared, groups, hidden) = (size(7), size(3), 12, size(60));
    let sizes = [shared * head, head, head];
    let starts = [0, groups * shared * head, groups * (shared + 1) * head];
    let mut columns = Vec::new();
    for group in 0..groups {
        for (start, len) in starts.into_iter().zip(sizes) {
            columns.push(start + group * len..start + (group + 1) * len);
        }
    }
    let mut drawn = columns.clone();
    for at in (1..drawn.len()).rev() {
        drawn.swap(at, random.below(at as u64 + 1) as usize);
    }
    // The columns one by one, as in a tensor with gate and up in turn.
    let mut singles: Vec<Range<usize>> = drawn
        .iter()
        .cloned()
        .flatten()
        .map(|at| at..at + 1)
        .collect();
    let last = singles.len() - 1;
    singles.swap(0, last);
    let units = vec![
        FusedPart::units(groups, shared * head),
        FusedPart::units(groups, head),
        FusedPart::units(groups, head),
    ];
    let param = |name, outer: &[usize], transposed, columns: &[Range<usize>]| Param {
        name,
        outer: outer.to_vec(),
        transposed,
        columns: columns.to_vec(),
        units: units.clone(),
    };
    vec![
        param("weight", &[hidden], true, &columns),
        param("bias", &[], true, &columns),
        param("weight.drawn", &[hidden], true, &drawn),
        param("bias.drawn", &[], false, &drawn),
        param("conv1d", &[hidden], false, &drawn),
        param("singles", &[hidden], false, &singles),
        param("singles.transposed", &[hidden], true, &singles),
        param("singles.bias", &[], false, &singles),
        param("experts", &[2, 3], true, &drawn),
        param("experts.conv1d", &[2, 3], false, &columns),
    ]
}

#[rstest]
fn columns_in_any_order_are_read_by_ranks_and_come_back(
    #[values(DType::BF16, DType::F32)] dtype: DType,
) {
    let mut random = Random::fresh();
    let params = params(&mut random);
    let tensors: Vec<_> = params
        .iter()
        .map(|p| p.stored(dtype, &mut random))
        .collect();
    let wholes: Vec<_> = params
        .iter()
        .zip(&tensors)
        .map(|(p, t)| p.whole(t))
        .collect();
    let dir = tempfile::tempdir().unwrap();
    let published = dir.path().join("published");
    let names: Vec<_> = tensors.iter().map(|tensor| tensor.name.clone()).collect();
    let bytes: Vec<_> = tensors.iter().map(|tensor| tensor.bytes.clone()).collect();
    publish_sharded(&published, tensors, 2);
    let hf = HfDir::open(&published).unwrap();
    for (param, whole) in params.iter().zip(&wholes) {
        for (rank, tp) in [(0, 1), (0, 2), (1, 2), (2, 3), (3, 4), (7, 12)] {
            let spec = param.spec(rank, tp);
            for wanted in [None, Some(DType::F32)] {
                let read = hf
                    .read_shard_in_order(
                        param.name,
                        &param.columns,
                        param.transposed,
                        &spec,
                        wanted,
                    )
                    .unwrap();
                let expected = cut(whole, &spec, dtype).convert_dtype(wanted.unwrap_or(dtype));
                let what = (param.name, rank, tp, wanted);
                assert_eq!(read.shape().to_vec(), spec.local_shape(), "{what:?}");
                assert!(read.as_bytes() == expected.as_bytes(), "{what:?}");
            }
        }
    }

    let specs: Vec<_> = params.iter().map(|param| param.spec(0, 1)).collect();
    let named = params.iter().zip(&specs).zip(&wholes);
    let named = named.map(|((param, spec), whole)| {
        let read = || {
            Ok(TensorData::from_bytes_vec(
                whole.clone(),
                param.shape(),
                dtype,
            ))
        };
        NamedTensor::lazy(param.name, spec, dtype, read)
    });
    let path = dir.path().join("checkpoint");
    save_single(&path, false, &Snapshot::default(), "dp1", named, &[]).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let entry = |param: &Param| HfEntry {
        name: param.name.into(),
        tensor: param.name.into(),
        columns: param.columns.clone(),
        transposed: param.transposed,
    };
    let view = HfView::new(&checkpoint, params.iter().map(entry).collect()).unwrap();
    assert_eq!(view.headers(), hf.headers());
    for (name, bytes) in names.iter().zip(&bytes) {
        let num_rows = hf.require(name).unwrap().num_rows();
        let all = view.read_rows(name, 0..num_rows).unwrap();
        assert!(all.as_bytes() == bytes.as_slice(), "{name}");
        for _ in 0..6 {
            let from = random.below(num_rows as u64 + 1) as usize;
            let to = from + random.below((num_rows - from) as u64 + 1) as usize;
            let found = view.read_rows(name, from..to).unwrap();
            assert_eq!(found, hf.read_rows(name, from..to).unwrap(), "{name}");
        }
    }
}

#[test]
fn a_tensor_with_too_few_columns_is_refused() {
    let mut random = Random::fresh();
    let dir = tempfile::tempdir().unwrap();
    let tensor = Stored::random("qkv", DType::F32, &[12, 5], &mut random);
    publish_sharded(dir.path(), vec![tensor], 1);
    let hf = HfDir::open(dir.path()).unwrap();
    let spec = ShardSpec::split(&[5, 18], 1, &[FusedPart::new(18)], Axis::Tp, 0, 1).unwrap();
    let error = hf
        .read_shard_in_order("qkv", &[9..18, 0..9], true, &spec, None)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("[18, 5]") && error.contains("[12, 5]"),
        "{error}"
    );
}

#[test]
fn a_stack_that_lacks_a_row_is_refused() {
    let mut random = Random::fresh();
    let dir = tempfile::tempdir().unwrap();
    let rows =
        [0, 2].map(|row| Stored::random(&format!("s[{row}]"), DType::F32, &[4], &mut random));
    publish_sharded(dir.path(), rows.into(), 1);
    let hf = HfDir::open(dir.path()).unwrap();
    let error = StackedRows::new(Box::new(&hf)).unwrap_err().to_string();
    assert!(error.contains("`s[1]`"), "{error}");
}

/// A row of a stack has the name of the stack with its number.
#[test]
fn rows_of_a_stack_are_tensors_and_tensors_become_rows_of_a_stack() {
    let mut random = Random::fresh();
    let dir = tempfile::tempdir().unwrap();
    let [stacked, alone] = ["stacked", "alone"].map(|name| dir.path().join(name));
    let stack = Stored::random("stack", DType::BF16, &[3, 4, 5], &mut random);
    let vectors = Stored::random("vectors", DType::F32, &[2, 6], &mut random);
    let rows: Vec<Stored> = [(&stack, 3), (&vectors, 2)]
        .into_iter()
        .flat_map(|(of, count)| {
            let parts = of.bytes.chunks(of.bytes.len() / count).enumerate();
            parts.map(|(row, bytes)| Stored {
                name: format!("{}[{row}]", of.name),
                dtype: of.dtype,
                shape: of.shape[1..].to_vec(),
                bytes: bytes.to_vec(),
            })
        })
        .collect();
    publish_sharded(&stacked, vec![stack, vectors], 2);
    publish_sharded(&alone, rows, 2);
    let [stacked, alone] = [stacked, alone].map(|path| HfDir::open(&path).unwrap());
    for header in alone.headers() {
        assert_eq!(stacked.header(&header.name), Some(header.clone()));
        let all = 0..header.num_rows();
        assert_eq!(
            stacked.read_rows(&header.name, all.clone()).unwrap(),
            alone.read_rows(&header.name, all).unwrap()
        );
        let spec = ShardSpec::whole(&header.shape, Axis::Tp, 0, 1);
        let read = |dir: &HfDir| {
            dir.read_shard(std::slice::from_ref(&header.name), false, &spec, None)
                .unwrap()
        };
        assert_eq!(read(&stacked), read(&alone));
    }
    let missing = stacked.require("stack[3]").unwrap_err();
    assert!(matches!(missing, CheckpointError::MissingTensor { .. }));

    let view = StackedRows::new(Box::new(&alone)).unwrap();
    assert_eq!(view.headers(), stacked.headers());
    for (name, rows) in [("stack", 0..3), ("stack", 1..2), ("vectors", 0..2)] {
        assert_eq!(
            view.read_rows(name, rows.clone()).unwrap(),
            stacked.read_rows(name, rows).unwrap()
        );
    }
}
