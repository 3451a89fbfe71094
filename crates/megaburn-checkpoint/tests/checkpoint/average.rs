//! The weighted mean of several checkpoints, selections of tensors, and checkpoints of any source.

use std::path::Path;

use burn::tensor::{DType, bf16};
use megaburn_checkpoint::{
    Average, Checkpoint, HfDir, Selection, Snapshot, TensorSource, compare, save_source,
};
use serde_json::{Value, json};

use crate::{
    model::{Random, names, save_as},
    published::{Stored, publish},
};

/// Random tensors of all float types, one of them longer than a block of conversion.
fn random(random: &mut Random) -> Vec<Stored> {
    let [f32, f64, bf16] = [DType::F32, DType::F64, DType::BF16];
    vec![
        Stored::random("a", bf16, &[7, 11], random),
        Stored::random("b", f32, &[3, 40_003], random),
        Stored::random("c", f64, &[5], random),
        Stored::random("d", DType::F16, &[2, 3, 4], random),
    ]
}

fn opened(dir: &Path, name: &str, tensors: &[Stored]) -> HfDir {
    publish(&dir.join(name), tensors);
    HfDir::open(&dir.join(name)).unwrap()
}

fn read(source: &dyn TensorSource, name: &str) -> Vec<u8> {
    let headers = source.headers();
    let header = headers.iter().find(|header| header.name == name).unwrap();
    let rows = 0..header.num_rows();
    source.read_rows(name, rows).unwrap().as_bytes().to_vec()
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    let chunks = bytes.as_chunks().0.iter();
    chunks.map(|x| f32::from_le_bytes(*x)).collect()
}

#[test]
fn each_element_is_the_weighted_mean_rounded_once() {
    let mut rng = Random::fresh();
    let dir = tempfile::tempdir().unwrap();
    let all: Vec<_> = (0..3).map(|_| random(&mut rng)).collect();
    let names = ["x", "y", "z"];
    let opened: Vec<_> = names
        .iter()
        .zip(&all)
        .map(|(name, of)| opened(dir.path(), name, of))
        .collect();
    let weights = [2.0, 0.5, 1.5];
    let sources = opened
        .iter()
        .map(|source| source as &dyn TensorSource)
        .zip(weights);
    let mean = Average::new(sources.collect()).unwrap();
    assert_eq!(mean.headers(), opened[0].headers());
    let of = |values: [f64; 3]| (values[0] * 2.0 + values[1] * 0.5 + values[2] * 1.5) / 4.0;

    let [x, y, z] = [0, 1, 2].map(|source| f32s(&all[source][1].bytes));
    let expected = (0..x.len()).map(|i| of([x[i], y[i], z[i]].map(f64::from)) as f32);
    // The sum has the sources' order, but the weights are divided by their sum first.
    let off = |(a, b): (f32, f32)| (a - b).abs() <= a.abs() * f32::EPSILON;
    let found = f32s(&read(&mean, "b"));
    assert_eq!(found.len(), 3 * 40_003);
    assert!(found.into_iter().zip(expected).all(off));

    let halves = |source: usize| {
        let bytes = all[source][0].bytes.as_chunks().0.iter();
        bytes
            .map(|x| bf16::from_le_bytes(*x).to_f64())
            .collect::<Vec<_>>()
    };
    let [x, y, z] = [0, 1, 2].map(halves);
    let found = read(&mean, "a");
    for (i, found) in found.as_chunks().0.iter().enumerate() {
        let exact = of([x[i], y[i], z[i]]);
        let found = bf16::from_le_bytes(*found).to_f64();
        assert!(
            (found - exact).abs() <= exact.abs() / 256.0,
            "{found}, not {exact}"
        );
    }
    assert!(mean.label().starts_with("the mean of ") && mean.label().ends_with('z'));
}

#[test]
fn the_mean_of_equal_sources_is_the_source() {
    let mut rng = Random::fresh();
    let dir = tempfile::tempdir().unwrap();
    let mut tensors = random(&mut rng);
    // Of f64, three weights of 1/3 may round.
    tensors.remove(2);
    let other = opened(dir.path(), "other", &random(&mut rng)[..2]);
    let source = opened(dir.path(), "x", &tensors);
    let three = Average::new(vec![(&source as &dyn TensorSource, 0.1); 3]).unwrap();
    assert!(compare(&source, &three, |_| {}).unwrap().is_identical());
    // A weight of 0 leaves a source out, even one of NaNs.
    let two = Selection::new(&source, |name| name < "c");
    let zero = Average::new(vec![(&other as &dyn TensorSource, 0.0), (&two, 7.0)]).unwrap();
    assert!(compare(&two, &zero, |_| {}).unwrap().is_identical());
}

#[test]
fn sources_that_differ_and_weights_that_are_none_are_refused() {
    let mut rng = Random::fresh();
    let dir = tempfile::tempdir().unwrap();
    let stored = |name: &str, dtype, shape: &[usize], rng: &mut Random| {
        [Stored::random(name, dtype, shape, rng)]
    };
    let of = |name: &str, tensors: &[Stored]| opened(dir.path(), name, tensors);
    let first = of("first", &stored("w", DType::F32, &[2, 3], &mut rng));
    let cases = [
        ("v", DType::F32, &[2, 3][..], "`v` cannot be averaged: "),
        ("w", DType::F32, &[3, 2], "its shape is [2, 3] in "),
        ("w", DType::BF16, &[2, 3], "checkpoint weights --dtype"),
    ];
    for (number, (name, dtype, shape, why)) in cases.into_iter().enumerate() {
        let other = of(&number.to_string(), &stored(name, dtype, shape, &mut rng));
        let sources = vec![(&first as &dyn TensorSource, 1.0), (&other, 1.0)];
        let error = Average::new(sources).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    let none = of("none", &[]);
    let error = Average::new(vec![(&first as &dyn TensorSource, 1.0), (&none, 1.0)]);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("none does not have it"), "{error}");
    let ints = of("ints", &stored("w", DType::I64, &[2, 3], &mut rng));
    let error = Average::new(vec![(&ints as &dyn TensorSource, 1.0)])
        .unwrap_err()
        .to_string();
    assert!(error.contains("I64, not a float"), "{error}");
    for weights in [
        &[][..],
        &[1.0, -0.5],
        &[0.0, 0.0],
        &[f64::NAN],
        &[f64::INFINITY],
    ] {
        let sources = weights
            .iter()
            .map(|weight| (&first as &dyn TensorSource, *weight));
        let error = Average::new(sources.collect()).unwrap_err().to_string();
        let named = format!("the weights of an average are {weights:?}");
        assert!(error.starts_with(&named), "{error}");
    }
}

#[test]
fn a_selection_becomes_a_checkpoint_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let path = save_as(&dir.path().join("all"), 1, 7, "tp4");
    let all = Checkpoint::open(&path).unwrap();
    let model = Selection::new(&all, |name| name.starts_with("model."));
    assert_eq!(model.headers().len(), all.headers().len() - 1);
    let error = model
        .read_rows("exp_avg.embedding.weight", 0..1)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("no tensor `exp_avg.embedding.weight`; the nearest is `model."),
        "{error}"
    );

    let snapshot = Snapshot {
        run_id: None,
        step: 7,
        model: json!({"hidden": 6}),
        trainer: Value::Null,
    };
    let out = dir.path().join("out");
    save_source(&out, false, &snapshot, &model, |header| header.dtype, &[]).unwrap();
    let saved = Checkpoint::open(&out).unwrap();
    saved.verify().unwrap();
    assert_eq!((saved.step(), saved.trainer()), (7, &Value::Null));
    assert!(compare(&model, &saved, |_| {}).unwrap().is_identical());

    // Floats become wider, and what cannot be converted leaves nothing behind.
    let floats = Selection::new(&all, |name| name.ends_with("down.weight"));
    save_source(&out, true, &snapshot, &floats, |_| DType::F32, &[]).unwrap();
    let wide = Checkpoint::open(&out).unwrap();
    assert_eq!(
        wide.dtype("model.layers.0.down.weight").unwrap(),
        DType::F32
    );
    assert!(
        compare(&floats, &wide, |_| {})
            .unwrap()
            .values_differ
            .is_empty()
    );
    let ints = dir.path().join("ints");
    let error = save_source(&ints, false, &snapshot, &model, |_| DType::F32, &[]);
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("`model.layers.0.cube` is I64, but must be F32"),
        "{error}"
    );
    assert_eq!(names(dir.path()), ["all", "out"]);
}
