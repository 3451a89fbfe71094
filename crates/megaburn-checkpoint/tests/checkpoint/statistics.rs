//! Statistics of tensors, compared with the textbook's formulas in one pass over all values.

use burn::tensor::DType;
use megaburn_checkpoint::{HfDir, TensorSource, TensorStatistics, statistics};
use rstest::rstest;

use crate::{
    model::Random,
    published::{Stored, publish},
};

/// The statistics of the tensors, by name.
fn found(tensors: &[Stored]) -> Vec<TensorStatistics> {
    let dir = tempfile::tempdir().unwrap();
    publish(dir.path(), tensors);
    let source = HfDir::open(dir.path()).unwrap();
    let headers = source.headers();
    let of = |header| statistics(&source, header).unwrap();
    headers.iter().map(of).collect()
}

fn f32s(name: &str, shape: &[usize], values: &[f32]) -> Stored {
    Stored {
        name: name.into(),
        dtype: DType::F32,
        shape: shape.to_vec(),
        bytes: values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

#[test]
fn values_that_are_not_finite_are_counted_and_left_out() {
    let values = [
        3.0,
        f32::NAN,
        -0.0,
        -1.0,
        f32::NEG_INFINITY,
        0.0,
        f32::INFINITY,
        2.0,
    ];
    let of = found(&[
        f32s("a", &[2, 4], &values),
        f32s("b", &[1], &[f32::NAN]),
        f32s("c", &[0, 3], &[]),
        f32s("d", &[], &[-2.5]),
    ]);
    let a = of[0];
    assert_eq!(
        (a.num_values, a.num_zeros, a.num_nan, a.num_infinite),
        (8, 2, 1, 2)
    );
    assert_eq!((a.mean, a.min, a.max), (0.8, -1.0, 3.0));
    assert_eq!(a.norm, 14f64.sqrt());
    assert!((a.std - 2.16f64.sqrt()).abs() < 1e-15, "{a:?}");
    assert_eq!(a.share_of_zeros(), 0.25);
    for (of, num_nan) in [(of[1], 1), (of[2], 0)] {
        assert!([of.mean, of.std, of.min, of.max].iter().all(|x| x.is_nan()));
        assert_eq!(
            (of.num_values, of.num_nan, of.norm),
            (num_nan, num_nan, 0.0)
        );
        assert_eq!((of.num_infinite, of.share_of_zeros()), (0, 0.0));
    }
    let d = of[3];
    assert_eq!(
        (d.mean, d.std, d.min, d.max, d.norm),
        (-2.5, 0.0, -2.5, -2.5, 2.5)
    );
}

/// The tensor has several blocks, and its mean is 4,000 times its standard deviation, where the
/// difference of the mean square and the squared mean has no correct digit in f32.
#[rstest]
#[case::ragged(&[1300, 3413])]
#[case::long(&[70_001])]
fn a_long_tensor_of_large_mean_has_the_right_deviation(#[case] shape: &[usize]) {
    let mut random = Random::fresh();
    let count = shape.iter().product();
    let value = |random: &mut Random| 1000.0 + (random.next() as f64 / 2f64.powi(64)) as f32;
    let values: Vec<f32> = (0..count).map(|_| value(&mut random)).collect();
    let of = found(&[f32s("w", shape, &values)])[0];
    let exact: Vec<f64> = values.iter().map(|x| f64::from(*x)).collect();
    let mean = exact.iter().sum::<f64>() / count as f64;
    let spread: f64 = exact.iter().map(|x| (x - mean) * (x - mean)).sum();
    let std = (spread / count as f64).sqrt();
    assert!((of.mean - mean).abs() < 1e-9, "{of:?}, not {mean}");
    assert!((of.std - std).abs() < 1e-9, "{of:?}, not {std}");
    assert!(of.std > 0.28 && of.std < 0.30);
    let min = exact.iter().copied().fold(f64::INFINITY, f64::min);
    assert_eq!((of.num_values, of.min), (count as u64, min));
}

#[rstest]
fn every_type_is_read(
    #[values(DType::F64, DType::F32, DType::F16, DType::BF16, DType::I64, DType::U8)] dtype: DType,
) {
    let mut random = Random::fresh();
    let tensor = Stored::random("w", dtype, &[37, 5], &mut random);
    let of = found(&[tensor])[0];
    assert_eq!((of.num_values, of.num_nan, of.num_infinite), (185, 0, 0));
    assert!(
        of.min <= of.mean && of.mean <= of.max && of.std > 0.0,
        "{of:?}"
    );
    let norm = (185.0 * (of.mean * of.mean + of.std * of.std)).sqrt();
    assert!((of.norm / norm - 1.0).abs() < 1e-9, "{of:?}");
}
