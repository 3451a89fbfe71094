//! `CrossEntropy` against Megatron's values, Burn's loss and the formula written out in f64.

use burn::{
    nn::loss::CrossEntropyLossConfig,
    prelude::{Device, Int},
    tensor::{DType, Tensor, TensorData},
};
use megaburn_collective::Group;
use megaburn_mesh::{Axis, PositionRng, Purpose, ShardSpec, pad_vocab};
use megaburn_parallel::CrossEntropyConfig;
use rstest::rstest;

use crate::support::{
    assert_bits, assert_close, autodiff, cut, floats, fresh_seed, join, leaf, normal, on_ranks,
    tokens,
};

fn ints(data: &TensorData) -> Vec<i64> {
    data.iter::<i64>().collect()
}

/// Losses and their derivatives by definition, in f64.
fn dense(
    logits: &TensorData,
    labels: &TensorData,
    config: &CrossEntropyConfig,
) -> (TensorData, TensorData) {
    let k = config.vocab as f64;
    let smoothing = config.label_smoothing * k / (k - 1.0);
    let mut losses = Vec::new();
    let mut jacobian = Vec::new();
    for (row, label) in floats(logits).chunks(config.vocab).zip(ints(labels)) {
        if label == config.ignore_index {
            losses.push(0.0);
            jacobian.extend(vec![0.0; config.vocab]);
            continue;
        }
        let row: Vec<f64> = row.iter().map(|&x| f64::from(x)).collect();
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let log_sum = max + row.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
        let mut loss = 0.0;
        for (token, x) in row.iter().enumerate() {
            let hot = if token as i64 == label { 1.0 } else { 0.0 };
            let wanted = (1.0 - smoothing) * hot + smoothing / k;
            loss -= wanted * (x - log_sum);
            jacobian.push(((x - log_sum).exp() - wanted) as f32);
        }
        losses.push(loss as f32);
    }
    (
        TensorData::new(losses, labels.shape()),
        TensorData::new(jacobian, logits.shape()),
    )
}

/// Fills the padding columns with extreme values, which must not matter.
fn poison(local: &TensorData, spec: &ShardSpec, seed: u64) -> TensorData {
    let rng = PositionRng::new(seed, Purpose::Sampling, "poison");
    let poisons = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3e38, -1e30, 1.0];
    let mut values = floats(local);
    let real = spec.pieces[0].local.len();
    for (i, value) in values.iter_mut().enumerate() {
        if i % spec.local_len >= real {
            *value = poisons[rng.below(i as u64, poisons.len() as u64) as usize];
        }
    }
    TensorData::new(values, local.shape())
}

/// The losses, and the gathered gradient of `sum(loss * weight)` by the logits, on `ranks` ranks
/// with poisoned padding.
fn run(
    config: &CrossEntropyConfig,
    ranks: usize,
    multiple: usize,
    logits: &TensorData,
    labels: &TensorData,
    weight: &TensorData,
) -> (TensorData, TensorData) {
    let padded = pad_vocab(config.vocab, multiple, ranks);
    let mut results = on_ranks(ranks, 1, |group| {
        let rank = group.rank();
        let size = group.size();
        let shape = logits.shape();
        let spec = ShardSpec::split_padded(shape, 2, padded, Axis::Tp, rank, size).unwrap();
        let mine = poison(&cut(logits, &spec, false), &spec, rank as u64);
        let labels = Tensor::<2, Int>::from_data(labels.clone(), &autodiff());
        let loss = config.init(&group).unwrap();
        let x = leaf::<3>(mine.clone());
        let losses = loss.forward(x.clone(), labels.clone());
        let weight = Tensor::from_data(weight.clone(), &autodiff());
        let grads = (losses.clone() * weight).sum().backward();

        let plain = Tensor::<3>::from_data(mine, &Device::flex());
        let evaluated = loss.forward(plain, labels.inner());
        assert_bits(
            "without autodiff",
            &evaluated.into_data(),
            &losses.to_data(),
        );
        (
            losses.into_data(),
            (spec, x.grad(&grads).unwrap().into_data()),
        )
    });
    for (losses, _) in &results {
        assert_bits("losses of all ranks", losses, &results[0].0);
    }
    let losses = results[0].0.clone();
    let grads: Vec<_> = results.drain(..).map(|(_, grad)| grad).collect();
    (losses, join("gradient", &grads))
}

/// The gradient of each row: its derivative times its weight.
fn times(jacobian: &TensorData, weight: &TensorData) -> TensorData {
    let k = jacobian.shape()[2];
    let weight = floats(weight);
    let values = floats(jacobian)
        .iter()
        .enumerate()
        .map(|(i, j)| j * weight[i / k])
        .collect();
    TensorData::new(values, jacobian.shape())
}

fn check(
    config: &CrossEntropyConfig,
    ranks: usize,
    multiple: usize,
    logits: &TensorData,
    labels: &TensorData,
) {
    let weight = normal(labels.shape(), 5, "weight");
    let (losses, grad) = run(config, ranks, multiple, logits, labels, &weight);
    let (wanted, jacobian) = dense(logits, labels, config);
    assert_close("losses", &losses, &wanted, 1e-6);
    assert_close("gradient", &grad, &times(&jacobian, &weight), 1e-6);
}

#[test]
fn the_values_are_megatrons() {
    // Source of the expected values: tests/unit_tests/tensor_parallel/test_cross_entropy.py
    let losses = on_ranks(4, 0, |group| {
        let logits = (0..16 * 32).map(|i| (i % 8) as f32).collect();
        let logits = leaf::<3>(TensorData::new(logits, [16, 1, 32]));
        let labels = TensorData::new((0..16).map(|i| 2 * i).collect::<Vec<i64>>(), [16, 1]);
        let labels = Tensor::<2, Int>::from_data(labels, &autodiff());
        CrossEntropyConfig::new(128)
            .init(&group)
            .unwrap()
            .forward(logits, labels)
            .into_data()
    });
    let expected = [10.2309, 8.2309, 6.2309, 4.2309].repeat(4);
    for losses in losses {
        let off = floats(&losses)
            .iter()
            .zip(&expected)
            .any(|(a, b)| (a - b).abs() > 5e-5);
        assert!(!off, "{losses:?}");
    }
}

#[rstest]
fn losses_and_gradients_follow_the_definition(
    #[values(1, 2, 3, 4, 8)] ranks: usize,
    #[values((16, 1), (13, 1), (5, 8), (30, 16))] (vocab, multiple): (usize, usize),
    #[values(0.0, 0.1, 0.5)] smoothing: f64,
    #[values([6, 2], [5, 3])] shape: [usize; 2],
) {
    // With 5 tokens, padded to 8 per rank, all ranks except the first hold only padding.
    let seed = fresh_seed();
    let config = CrossEntropyConfig::new(vocab).with_label_smoothing(smoothing);
    let logits = normal(&[shape[0], shape[1], vocab], seed, "logits");
    let mut labels = ints(&tokens(shape, vocab, seed, "labels"));
    labels[1] = -100;
    labels[4] = -100;
    check(
        &config,
        ranks,
        multiple,
        &logits,
        &TensorData::new(labels, shape),
    );
}

#[rstest]
fn any_label_may_be_the_one_to_ignore(
    #[values(1, 2, 4)] ranks: usize,
    #[values(-1, 0, 7, 14, 500)] ignore_index: i64,
) {
    // 14 is the first column of the padding.
    let config = CrossEntropyConfig::new(14)
        .with_ignore_index(ignore_index)
        .with_label_smoothing(0.2);
    let logits = normal(&[4, 2, 14], fresh_seed(), "logits");
    let labels = vec![3, ignore_index, 7, 0, 13, ignore_index, 1, 2];
    check(&config, ranks, 8, &logits, &TensorData::new(labels, [4, 2]));
    let ignored = TensorData::new(vec![ignore_index; 8], [4, 2]);
    let weight = normal(&[4, 2], 5, "weight");
    let (losses, grad) = run(&config, ranks, 8, &logits, &ignored, &weight);
    assert!(
        floats(&losses)
            .iter()
            .chain(&floats(&grad))
            .all(|&value| value == 0.0)
    );
}

#[rstest]
fn extreme_logits_neither_overflow_nor_vanish(
    #[values(1, 2, 3, 4)] ranks: usize,
    #[values(0.0, 0.1)] smoothing: f64,
) {
    let rows: [[f32; 6]; 5] = [
        [1e4, -1e4, 0.0, 1.0, 2.0, 3.0],
        [-1e4; 6],
        [1e4; 6],
        [-1e4, -1e4, -1e4, -1e4, -1e4, 1e4],
        [9999.0, 1e4, 9998.0, -1e4, 0.0, 1e4],
    ];
    let logits = TensorData::new(rows.concat(), [5, 1, 6]);
    let config = CrossEntropyConfig::new(6).with_label_smoothing(smoothing);
    for label in 0..6 {
        check(
            &config,
            ranks,
            1,
            &logits,
            &TensorData::new(vec![label; 5], [5, 1]),
        );
    }
}

#[rstest]
fn alone_it_is_burns_loss(#[values(0.0, 0.1)] smoothing: f64, #[values(12, 33)] vocab: usize) {
    let seed = fresh_seed();
    let logits = normal(&[5, 3, vocab], seed, "logits");
    let labels = tokens([5, 3], vocab, seed, "labels");
    let labels = Tensor::<2, Int>::from_data(labels, &autodiff());

    let x = leaf::<3>(logits.clone());
    let config = CrossEntropyConfig::new(vocab).with_label_smoothing(smoothing);
    let loss = config.init(&Group::single(seed)).unwrap();
    let mean = loss.forward(x.clone(), labels.clone()).sum() / 15.0;
    let grad = x.grad(&mean.backward()).unwrap();

    let y = leaf::<3>(logits);
    // Megatron's smoothing spreads over the other tokens, Burn's over all tokens.
    let spread = smoothing * vocab as f64 / (vocab as f64 - 1.0);
    let burns = CrossEntropyLossConfig::new()
        .with_smoothing((smoothing > 0.0).then_some(spread as f32))
        .init(&autodiff());
    let burn_mean = burns.forward(y.clone().reshape([15, vocab]), labels.reshape([15]));
    let burn_grad = y.grad(&burn_mean.backward()).unwrap();
    assert_close("mean", &mean.into_data(), &burn_mean.into_data(), 1e-6);
    assert_close("gradient", &grad.into_data(), &burn_grad.into_data(), 1e-6);
}

#[rstest]
#[case(DType::BF16, DType::F32)]
#[case(DType::F16, DType::F32)]
#[case(DType::F64, DType::F64)]
fn narrow_logits_give_losses_in_f32(#[case] dtype: DType, #[case] loss_dtype: DType) {
    let seed = fresh_seed();
    let logits = normal(&[4, 2, 50], seed, "logits");
    let config = CrossEntropyConfig::new(50);
    let loss = config.init(&Group::single(seed)).unwrap();
    let labels = tokens([4, 2], 50, seed, "labels");
    let labels = Tensor::<2, Int>::from_data(labels, &autodiff());
    let x = Tensor::from_inner(leaf::<3>(logits).cast(dtype).inner()).require_grad();
    let losses = loss.forward(x.clone(), labels.clone());
    assert_eq!(losses.dtype(), loss_dtype);
    let grad = x.grad(&losses.clone().sum().backward()).unwrap();
    assert_eq!(grad.dtype(), dtype);

    let rounded = x.inner().cast(DType::F32).into_data();
    let (wanted, jacobian) = dense(&rounded, &labels.into_data(), &config);
    assert_close(
        "losses",
        &losses.inner().cast(DType::F32).into_data(),
        &wanted,
        1e-6,
    );
    assert_close(
        "gradient",
        &grad.cast(DType::F32).into_data(),
        &jacobian,
        4e-3,
    );
}

#[test]
fn too_few_logits_for_the_vocabulary_are_refused() {
    let loss = CrossEntropyConfig::new(9).init(&Group::single(0)).unwrap();
    let forward = || {
        let labels = Tensor::<2, Int>::zeros([1, 1], &Device::flex());
        loss.forward(Tensor::zeros([1, 1, 8], &Device::flex()), labels)
    };
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(forward)).unwrap_err();
    assert_eq!(
        panic.downcast_ref::<String>().unwrap(),
        "1 x 8 logits are too few for a vocabulary of 9"
    );
}
