//! Compares two sets of tensors, including a source that fails.

use std::{fs, ops::Range, path::Path};

use burn::tensor::{DType, TensorData};
use megaburn_checkpoint::{
    CheckpointError, Comparison, HfDir, HfEntry, HfView, HfWriteOptions, TensorComparison,
    TensorHeader, TensorSource, Tolerance, compare, compare_within, write_hf,
};

use crate::{
    model::{Random, names, save_as},
    published::{Stored, publish},
};

fn values<const N: usize>(name: &str, values: [f32; N], shape: &[usize]) -> Stored {
    let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    Stored {
        name: name.into(),
        dtype: DType::F32,
        shape: shape.to_vec(),
        bytes,
    }
}

fn compared(dir: &Path, a: &[Stored], b: &[Stored]) -> (Comparison, Vec<TensorComparison>) {
    let [a, b] = [("a", a), ("b", b)].map(|(name, tensors)| {
        publish(&dir.join(name), tensors);
        HfDir::open(&dir.join(name)).unwrap()
    });
    let mut visited = Vec::new();
    let found = compare(&a, &b, |tensor| visited.push(tensor.clone())).unwrap();
    (found, visited)
}

#[test]
fn names_shapes_types_and_values_that_differ_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let inf = f32::INFINITY;
    let nan = f32::NAN;
    let bits = |name, bytes: &[u8], dtype| Stored {
        name: String::from(name),
        dtype,
        shape: vec![2],
        bytes: bytes.to_vec(),
    };
    let a = [
        values("equal", [1.0, nan, -inf, 0.0], &[2, 2]),
        values("far", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3]),
        values("nan", [1.0, nan, 3.0], &[3]),
        values("only a", [1.0], &[1]),
        values("shape", [1.0, 2.0], &[2]),
        bits(
            "type",
            &[1.5f32.to_le_bytes(), (-2.0f32).to_le_bytes()].concat(),
            DType::F32,
        ),
        values("zero", [0.0, nan, inf], &[3]),
    ];
    let b = [
        values("equal", [1.0, nan, -inf, 0.0], &[2, 2]),
        values("far", [1.0, 2.25, 3.0, 4.0, 4.5, 6.5], &[2, 3]),
        values("nan", [1.0, 2.0, 3.5], &[3]),
        values("only b", [1.0], &[1]),
        values("shape", [1.0, 2.0], &[1, 2]),
        bits("type", &[0xC0, 0x3F, 0x00, 0xC0], DType::BF16),
        values("zero", [-0.0, -nan, inf], &[3]),
    ];
    let (found, visited) = compared(dir.path(), &a, &b);
    let expected = Comparison {
        num_tensors: 8,
        only_in_a: vec!["only a".into()],
        only_in_b: vec!["only b".into()],
        shapes_differ: vec!["shape".into()],
        dtypes_differ: vec!["type".into()],
        values_differ: vec!["far".into(), "nan".into()],
        num_bitwise_equal: 1,
        max_abs: f64::INFINITY,
        worst: Some("nan".into()),
    };
    assert_eq!(found, expected);
    assert!(!found.is_identical());
    let names: Vec<_> = visited.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "equal", "far", "nan", "only a", "only b", "shape", "type", "zero"
        ]
    );
    let told = |name: &str| {
        let tensor = visited.iter().find(|tensor| tensor.name == name).unwrap();
        let values = tensor.values.clone().unwrap();
        (
            values.bitwise_equal,
            values.num_different,
            values.max_abs,
            values.at,
        )
    };
    assert_eq!(told("equal"), (true, 0, 0.0, None));
    assert_eq!(told("far"), (false, 3, 0.5, Some(vec![1, 1])));
    assert_eq!(told("nan"), (false, 2, f64::INFINITY, Some(vec![1])));
    assert_eq!(told("type"), (false, 0, 0.0, None));
    assert_eq!(told("zero"), (false, 0, 0.0, None));
}

#[test]
fn values_beyond_the_tolerance_and_the_relative_norm_are_those_of_the_formulas() {
    let dir = tempfile::tempdir().unwrap();
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let a = [
        values("far", [3.0, -4.0, 1.0, nan, 100.0], &[5]),
        values("nan", [1.0, inf, 2.0], &[3]),
        values("null", [0.0, 0.0], &[2]),
    ];
    let b = [
        values("far", [3.0, -4.25, 1.5, nan, 101.0], &[5]),
        values("nan", [1.0, -inf, nan], &[3]),
        values("null", [0.0, 1.0], &[2]),
    ];
    let [a, b] = [("a", &a), ("b", &b)].map(|(name, tensors)| {
        publish(&dir.path().join(name), tensors);
        HfDir::open(&dir.path().join(name)).unwrap()
    });
    // The differences are 0.25, 0.5 and 1 at values of 4.25, 1.5 and 101.
    for (rtol, atol, num_beyond) in [
        (0.0, 0.0, [3, 2, 1]),
        (0.0, 0.5, [1, 2, 1]),
        (0.01, 0.0, [2, 2, 1]),
        (0.01, 0.25, [1, 2, 1]),
        (1.0, 0.0, [0, 2, 0]),
        (0.0, 1.0, [0, 2, 0]),
    ] {
        let mut found = Vec::new();
        let tolerance = Tolerance { rtol, atol };
        compare_within(&a, &b, tolerance, |tensor| {
            found.push(tensor.values.clone().unwrap())
        })
        .unwrap();
        let beyond: Vec<_> = found.iter().map(|values| values.num_beyond).collect();
        assert_eq!(beyond, num_beyond, "{tolerance:?}");
        let different: Vec<_> = found.iter().map(|values| values.num_different).collect();
        assert_eq!(different, [3, 2, 1]);
        let first: Vec<_> = found.iter().map(|values| values.first.clone()).collect();
        assert_eq!(first, [1, 1, 1].map(|at| Some(vec![at])));
        assert_eq!(found[0].at, Some(vec![4]));
        let norm = (1.3125f64 / 10_026.0).sqrt();
        assert!((found[0].relative_norm - norm).abs() < 1e-12, "{found:?}");
        assert_eq!(found[1].relative_norm, f64::INFINITY);
        assert_eq!(found[2].relative_norm, f64::INFINITY);
    }
    let same = compare(&a, &a, |tensor| {
        let values = tensor.values.as_ref().unwrap();
        assert_eq!((values.relative_norm, &values.first), (0.0, &None));
    });
    assert!(same.unwrap().is_identical());
}

#[test]
fn large_integers_are_compared_exactly() {
    let dir = tempfile::tempdir().unwrap();
    let ints = |values: [i64; 2]| Stored {
        name: "i".into(),
        dtype: DType::I64,
        shape: vec![2],
        bytes: values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    };
    let (found, _) = compared(
        dir.path(),
        &[ints([i64::MAX, 5])],
        &[ints([i64::MAX - 1, 5])],
    );
    assert_eq!((found.max_abs, found.worst.as_deref()), (1.0, Some("i")));
}

/// The tensor is longer than a block and a comparison chunk; the index of the only difference must
/// still be right.
#[test]
fn one_flipped_bit_in_a_long_tensor_is_found_where_it_is() {
    let mut random = Random::fresh();
    let dir = tempfile::tempdir().unwrap();
    let shape = [1300, 3407 + random.below(100) as usize];
    let a = Stored::random("w", DType::F32, &shape, &mut random);
    assert!(a.bytes.len() > 16 << 20);
    let at = random.below((shape[0] * shape[1]) as u64) as usize;
    let mut bytes = a.bytes.clone();
    // The lowest bit of the mantissa.
    bytes[at * 4] ^= 1;
    let b = Stored {
        name: "w".into(),
        dtype: DType::F32,
        shape: shape.to_vec(),
        bytes,
    };
    let (found, visited) = compared(dir.path(), &[a], &[b]);
    assert_eq!(found.values_differ, ["w"]);
    let values = visited[0].values.clone().unwrap();
    assert_eq!(values.num_different, 1);
    assert_eq!(values.at, Some(vec![at / shape[1], at % shape[1]]));
}

#[test]
fn checkpoints_of_two_layouts_are_identical_and_of_two_steps_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let open = |name: &str, step, layout| {
        let path = save_as(&dir.path().join(name), 1, step, layout);
        megaburn_checkpoint::Checkpoint::open(&path).unwrap()
    };
    let a = open("a", 5, "tp4");
    let b = open("b", 5, "tp2-dp2");
    let later = open("c", 6, "tp4");
    assert!(compare(&a, &b, |_| {}).unwrap().is_identical());
    let found = compare(&a, &later, |_| {}).unwrap();
    assert!(found.values_differ.len() == found.num_tensors && !found.is_identical());

    let entry = |name: &str, tensor: &str, columns| HfEntry {
        name: name.into(),
        tensor: tensor.into(),
        columns: vec![columns],
        transposed: true,
    };
    let refused = |entries| HfView::new(&a, entries).unwrap_err().to_string();
    let error = refused(vec![entry("w", "model.norm.weight", 0..7)]);
    assert!(
        error.contains("of shape [6]: columns 0..7 are out of range"),
        "{error}"
    );
    let error = refused(vec![entry("w", "model.norn.weight", 0..6)]);
    assert!(
        error.contains("the nearest is `model.norm.weight`"),
        "{error}"
    );
    let twice = entry("w", "model.norm.weight", 0..6);
    assert!(refused(vec![twice.clone(), twice]).contains("already has this name"));
    let view = HfView::new(&a, vec![entry("half", "model.norm.weight", 2..5)]).unwrap();
    assert_eq!(view.label(), a.path().display().to_string());
    let error = view.read_rows("hal", 0..1).unwrap_err().to_string();
    assert!(
        error.contains("no tensor `hal`; the nearest is `half`"),
        "{error}"
    );
}

/// Fails at the given row.
struct Failing(usize);

impl TensorSource for Failing {
    fn label(&self) -> String {
        "failing".into()
    }

    fn headers(&self) -> Vec<TensorHeader> {
        let header = |name: &str| TensorHeader {
            name: name.into(),
            dtype: DType::F32,
            shape: vec![9, 1 << 20],
        };
        vec![header("first"), header("second")]
    }

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<TensorData, CheckpointError> {
        assert!(
            rows.len() << 22 <= 16 << 20,
            "{rows:?} are more than a block"
        );
        if name == "second" && rows.contains(&self.0) {
            return Err(CheckpointError::Source {
                name: name.into(),
                why: "unplugged".into(),
            });
        }
        let bytes = vec![0; rows.len() << 22];
        Ok(TensorData::from_bytes_vec(
            bytes,
            [rows.len(), 1 << 20],
            DType::F32,
        ))
    }
}

#[test]
fn a_source_that_fails_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let fails = |target: &Path| {
        let options = HfWriteOptions {
            max_shard_bytes: 1,
            force: true,
            ..Default::default()
        };
        let config = [("config.json".to_string(), b"{}".to_vec())];
        write_hf(target, &Failing(7), &options, &config)
            .unwrap_err()
            .to_string()
    };
    assert!(fails(&dir.path().join("new/out")).contains("unplugged"));
    assert_eq!(names(dir.path()), [""; 0]);
    let old = dir.path().join("old");
    publish(&old, &[values("w", [1.0], &[1])]);
    assert!(fails(&old).contains("unplugged"));
    assert_eq!(names(dir.path()), ["old"]);
    assert_eq!(HfDir::open(&old).unwrap().tensors().count(), 1);
    fs::write(dir.path().join("file"), "").unwrap();
    assert!(fails(&dir.path().join("file/out")).contains("cannot create the folder"));
    assert_eq!(names(dir.path()), ["file", "old"]);
    let error = compare(&Failing(0), &Failing(9), |_| {})
        .unwrap_err()
        .to_string();
    assert!(error.contains("unplugged"), "{error}");
}
