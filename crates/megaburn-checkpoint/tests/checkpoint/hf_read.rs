//! A rank's shard of a published model equals the shard of the assembled parameter.

use burn::tensor::DType;
use megaburn_checkpoint::{HfDir, TensorSource};
use megaburn_mesh::{Axis, FusedPart, ShardSpec, pad_vocab};
use rstest::rstest;

use crate::{
    model::Random,
    published::{Stored, assembled, cut, publish, publish_sharded},
};

/// Returns the shard spec of a parameter from its shape, a rank and the number of ranks.
type Cut = Box<dyn Fn(&[usize], usize, usize) -> ShardSpec>;

/// A parameter: the lengths of its parts along the last dimension, its other dimensions, and how it
/// is sharded.
struct Param {
    name: &'static str,
    outer: Vec<usize>,
    widths: Vec<usize>,
    transposed: bool,
    spec: Cut,
}

/// Parameters with every kind of sharding. Sizes are random in every run, and mostly not multiples
/// of anything.
fn params(random: &mut Random) -> Vec<Param> {
    let mut size = |max| 1 + random.below(max) as usize;
    let hidden = size(150);
    let head = size(9);
    let ffn = 12 * size(30);
    let vocab = size(300);
    let split = |dim: usize, parts: Vec<FusedPart>| -> Cut {
        Box::new(move |shape, rank, tp| {
            ShardSpec::split(shape, dim, &parts, Axis::Tp, rank, tp).unwrap()
        })
    };
    let padded = |dim: usize| -> Cut {
        Box::new(move |shape, rank, tp| {
            let padded = pad_vocab(vocab, 8, tp);
            ShardSpec::split_padded(shape, dim, padded, Axis::Tp, rank, tp).unwrap()
        })
    };
    // Twelve query heads, and one key/value head of which all ranks hold a copy.
    let heads = || {
        vec![
            FusedPart::units(12, head),
            FusedPart::units(1, head),
            FusedPart::units(1, head),
        ]
    };
    let qkv = vec![12 * head, head, head];
    let whole =
        || Box::new(|shape: &[usize], rank, tp| ShardSpec::whole(shape, Axis::Tp, rank, tp));
    let row = |name, outer, widths, transposed, spec| Param {
        name,
        outer,
        widths,
        transposed,
        spec,
    };
    vec![
        row("qkv", vec![hidden], qkv.clone(), true, split(1, heads())),
        row("qkv.bias", vec![], qkv, true, split(0, heads())),
        row(
            "gate_up",
            vec![hidden],
            vec![ffn; 2],
            true,
            split(1, vec![FusedPart::new(ffn); 2]),
        ),
        row(
            "down",
            vec![ffn],
            vec![hidden],
            true,
            split(0, vec![FusedPart::new(ffn)]),
        ),
        row(
            "conv1d",
            vec![ffn],
            vec![hidden],
            false,
            split(0, vec![FusedPart::new(ffn)]),
        ),
        row(
            "c_fc",
            vec![hidden],
            vec![ffn],
            false,
            split(1, vec![FusedPart::new(ffn)]),
        ),
        row("embedding", vec![vocab], vec![hidden], false, padded(0)),
        row("lm_head", vec![hidden], vec![vocab], true, padded(1)),
        row("norm", vec![], vec![hidden], false, whole()),
        row("scalar", vec![], vec![], false, whole()),
        row(
            "experts",
            vec![12, 3],
            vec![head, 2 * head],
            true,
            split(0, vec![FusedPart::new(12)]),
        ),
        row(
            "experts.mid",
            vec![2, 12, 3],
            vec![head],
            true,
            split(1, vec![FusedPart::new(12)]),
        ),
        row(
            "experts.rows",
            vec![2, ffn],
            vec![head],
            true,
            split(1, vec![FusedPart::new(ffn)]),
        ),
        row(
            "experts.cols",
            vec![3, head],
            vec![ffn],
            false,
            split(2, vec![FusedPart::new(ffn)]),
        ),
    ]
}

#[rstest]
fn a_shard_is_what_cutting_the_assembled_parameter_gives(
    #[values(1, 2, 3, 4)] tp: usize,
    #[values(DType::BF16, DType::F16, DType::F32, DType::F64)] stored: DType,
    #[values(false, true)] sharded: bool,
) {
    let mut random = Random::fresh();
    let params = params(&mut random);
    let mut tensors = Vec::new();
    let mut shapes = Vec::new();
    for Param {
        name,
        outer,
        widths,
        transposed,
        ..
    } in &params
    {
        let scalar = widths.is_empty();
        for (number, width) in widths
            .iter()
            .copied()
            .chain(scalar.then_some(0))
            .enumerate()
        {
            let mut shape = outer.clone();
            shape.extend((!scalar).then_some(width));
            if let (true, [.., a, b]) = (*transposed, shape.as_mut_slice()) {
                std::mem::swap(a, b);
            }
            tensors.push(Stored::random(
                &format!("{name}.{number}"),
                stored,
                &shape,
                &mut random,
            ));
        }
        let last = (!scalar).then(|| widths.iter().sum());
        shapes.push(outer.iter().copied().chain(last).collect::<Vec<usize>>());
    }
    let wholes: Vec<Vec<u8>> = params
        .iter()
        .zip(&shapes)
        .map(|(param, shape)| {
            let prefix = |t: &&Stored| t.name.rsplit_once('.').unwrap().0 == param.name;
            let parts: Vec<&Stored> = tensors.iter().filter(prefix).collect();
            assembled(&parts, param.transposed, shape)
        })
        .collect();
    let dir = tempfile::tempdir().unwrap();
    if sharded {
        publish_sharded(dir.path(), tensors, 3)
    } else {
        publish(dir.path(), &tensors)
    }
    let hf = HfDir::open(dir.path()).unwrap();
    for ((param, shape), whole) in params.iter().zip(&shapes).zip(&wholes) {
        let names: Vec<String> = (0..param.widths.len().max(1))
            .map(|i| format!("{}.{i}", param.name))
            .collect();
        for rank in 0..tp {
            let spec = (param.spec)(shape, rank, tp);
            let expected = cut(whole, &spec, stored);
            for wanted in [None, Some(DType::F32), Some(DType::BF16), Some(stored)] {
                if (stored, wanted) == (DType::F64, Some(DType::BF16)) {
                    // Burn rounds this conversion twice.
                    continue;
                }
                let read = hf
                    .read_shard(&names, param.transposed, &spec, wanted)
                    .unwrap();
                let expected = expected.clone().convert_dtype(wanted.unwrap_or(stored));
                let what = (param.name, rank, shape, wanted);
                assert_eq!(read.dtype(), expected.dtype(), "{what:?}");
                assert_eq!(read.shape().to_vec(), spec.local_shape(), "{what:?}");
                assert!(read.as_bytes() == expected.as_bytes(), "{what:?}");
            }
        }
    }
}

#[test]
fn integers_and_truth_values_are_read_as_they_are() {
    let mut random = Random::fresh();
    let bool = DType::Bool(burn::tensor::BoolStore::Native);
    let dir = tempfile::tempdir().unwrap();
    let tensors = [DType::I64, DType::U8, bool]
        .map(|dtype| Stored::random(&format!("{dtype:?}"), dtype, &[5, 7], &mut random));
    publish(dir.path(), &tensors);
    let hf = HfDir::open(dir.path()).unwrap();
    assert_eq!(hf.config()["model_type"], "test");
    assert_eq!(hf.tensors().count(), 3);
    for tensor in &tensors {
        let header = hf.header(&tensor.name).unwrap();
        assert_eq!((header.dtype, &header.shape), (tensor.dtype, &tensor.shape));
        let rows = hf.read_rows(&tensor.name, 0..header.num_rows()).unwrap();
        assert_eq!(rows.as_bytes(), tensor.bytes);
        let spec = ShardSpec::split(&[7, 5], 1, &[FusedPart::new(5)], Axis::Tp, 0, 1).unwrap();
        let names = [tensor.name.clone()];
        let read = hf.read_shard(&names, true, &spec, None).unwrap();
        assert_eq!(read.as_bytes(), assembled(&[tensor], true, &[7, 5]));
        let error = hf
            .read_shard(&names, true, &spec, Some(DType::F32))
            .unwrap_err()
            .to_string();
        assert!(error.contains(", but must be F32"), "{error}");
    }
    assert!(hf.header("none").is_none() && hf.are_equal("U8", "none").is_err());
}

#[test]
fn the_single_file_comes_before_the_index() {
    let mut random = Random::fresh();
    let dir = tempfile::tempdir().unwrap();
    let mut tensor = |name| Stored::random(name, DType::F32, &[3], &mut random);
    publish_sharded(dir.path(), vec![tensor("indexed")], 1);
    publish(dir.path(), &[tensor("single")]);
    let hf = HfDir::open(dir.path()).unwrap();
    assert_eq!(
        hf.tensors().map(|header| header.name).collect::<Vec<_>>(),
        ["single"]
    );
}
