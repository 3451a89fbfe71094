use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use burn::{module::ParamId, tensor::Device};
use megaburn_collective::{Group, ProcessGroups};
use megaburn_mesh::Layout;
use rstest::rstest;

use super::*;
use crate::{
    accumulator::GradientAccumulator,
    rule::AdamWConfig,
    sharding::{Sharding, ShardingConfig, ShardingLevel},
    testing::{Net, plan_of, unused, values},
};

fn f32_values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    values(tensor.cast(DType::F32))
}

/// A net in `dtype`, its optimizer, and the values before the cast.
fn cast_net(dtype: FloatDType) -> (Net, Optimizer, [Vec<f32>; 2]) {
    let net = Net::new(3, 4, 0, 1, &Device::default().autodiff());
    let before = [values(net.matrix.val()), values(net.bias.val())];
    let mut optimizer = AdamWConfig::new()
        .with_weight_decay(0.0)
        .init(&Sharding::none())
        .unwrap();
    let net = optimizer.cast_params(net, dtype);
    (net, optimizer, before)
}

/// One step along the gradient of `sum(matrix)`, which is 1 everywhere.
fn step(net: Net, optimizer: &mut Optimizer, grads: &mut GradientAccumulator, lr: f64) -> Net {
    grads.reset();
    grads.accumulate(&net, &mut net.matrix.val().sum().backward());
    optimizer.step(lr, net, grads).unwrap()
}

fn rounded(values: &[f32], dtype: FloatDType) -> Vec<f32> {
    f32_values(Tensor::<1>::from_floats(values, &Device::default()).cast(dtype))
}

#[rstest]
#[case(FloatDType::BF16)]
#[case(FloatDType::F16)]
fn a_narrow_parameter_is_its_master_rounded_from_the_start(#[case] dtype: FloatDType) {
    let (net, optimizer, [matrix, bias]) = cast_net(dtype);
    assert_eq!(net.matrix.val().dtype(), dtype.into());
    assert!(net.matrix.val().is_require_grad() && net.matrix.val().is_autodiff());
    assert_eq!(values(optimizer.master("matrix", unused).unwrap()), matrix);
    assert_eq!(values(optimizer.master("bias", unused).unwrap()), bias);
    assert_eq!(f32_values(net.matrix.val()), rounded(&matrix, dtype));
    assert_ne!(f32_values(net.matrix.val()), matrix);
}

/// With constant gradients, Adam moves each element by the learning rate. 1e-4 per step is less
/// than half the distance between two bf16 (or f16) numbers below 1.
#[rstest]
#[case(FloatDType::BF16)]
#[case(FloatDType::F16)]
fn small_steps_move_the_master_and_in_the_end_the_parameter(#[case] dtype: FloatDType) {
    let mut net = Net::new(3, 4, 0, 1, &Device::default().autodiff());
    net.matrix = net
        .matrix
        .map(|t| t.inner().ones_like().autodiff().require_grad());
    let mut optimizer = AdamWConfig::new()
        .with_weight_decay(0.0)
        .init(&Sharding::none())
        .unwrap();
    net = optimizer.cast_params(net, dtype);
    let mut grads =
        GradientAccumulator::new(&net, &plan_of(3, 4, 0, 1), &Sharding::none()).unwrap();
    for taken in 1..=100 {
        net = step(net, &mut optimizer, &mut grads, 1e-4);
        let master = values(optimizer.master("matrix", unused).unwrap());
        let matrix = &net.matrix;
        let expected = 1.0 - 1e-4 * taken as f32;
        assert!(
            master.iter().all(|x| (x - expected).abs() < 1e-5),
            "{taken}: {master:?}"
        );
        assert_eq!(f32_values(matrix.val()), rounded(&master, dtype));
        assert_eq!(
            f32_values(matrix.val()) == [1.0; 12],
            expected > 1.0 - half_step(dtype)
        );
    }
}

/// Half the distance from 1 to the next smaller number.
fn half_step(dtype: FloatDType) -> f32 {
    if dtype == FloatDType::BF16 {
        2f32.powi(-9)
    } else {
        2f32.powi(-12)
    }
}

#[test]
fn masters_of_narrow_parameters_are_updated_as_f32_parameters_are() {
    let (mut narrow, mut with_masters, [matrix, bias]) = cast_net(FloatDType::BF16);
    let device = Device::default().autodiff();
    let mut plain = Net::new(3, 4, 0, 1, &device);
    let set = |values: &[f32]| Tensor::<1>::from_floats(values, &device).require_grad();
    plain.matrix = plain.matrix.map(|_| {
        set(&matrix)
            .inner()
            .reshape([3, 4])
            .autodiff()
            .require_grad()
    });
    plain.bias = plain.bias.map(|_| set(&bias));
    let mut without = AdamWConfig::new()
        .with_weight_decay(0.0)
        .init(&Sharding::none())
        .unwrap();
    let plan = plan_of(3, 4, 0, 1);
    let mut grads = GradientAccumulator::new(&plain, &plan, &Sharding::none()).unwrap();
    for _ in 0..5 {
        // The gradient does not depend on the values, so it is the same for both.
        plain = step(plain, &mut without, &mut grads, 1e-2);
        narrow = with_masters.step(1e-2, narrow, &grads).unwrap();
    }
    assert_eq!(
        values(with_masters.master("matrix", unused).unwrap()),
        values(plain.matrix.val())
    );
    assert_eq!(
        f32_values(narrow.matrix.val()),
        rounded(&values(plain.matrix.val()), FloatDType::BF16)
    );
    assert!(
        without.master("matrix", unused).is_none(),
        "an f32 parameter is its own master"
    );
}

#[test]
fn only_trainable_narrow_parameters_have_masters_and_casting_again_changes_nothing() {
    let mut net = Net::new(3, 4, 0, 1, &Device::default().autodiff());
    net.bias = net.bias.set_require_grad(false);
    let matrix = values(net.matrix.val());
    let mut optimizer = AdamWConfig::new().init(&Sharding::none()).unwrap();
    net = optimizer.cast_params(net, FloatDType::F32);
    assert!(
        optimizer.master("matrix", unused).is_none() && optimizer.master("bias", unused).is_none()
    );
    net = optimizer.cast_params(net, FloatDType::BF16);
    assert!(optimizer.master("bias", unused).is_none() && !net.bias.val().is_require_grad());
    net = optimizer.cast_params(net, FloatDType::BF16);
    assert_eq!(values(optimizer.master("matrix", unused).unwrap()), matrix);
    net = optimizer.cast_params(net, FloatDType::F32);
    assert_eq!(net.matrix.val().dtype(), DType::F32);
    assert!(
        optimizer.master("matrix", unused).is_none() && optimizer.master("bias", unused).is_none()
    );
}

/// A net that counts how often its matrix is initialized.
fn lazy_net(drawn: &Arc<AtomicUsize>) -> Net {
    let device = Device::default().autodiff();
    let drawn = drawn.clone();
    let draw = move |device: &Device, requires_grad: bool| {
        drawn.fetch_add(1, Ordering::Relaxed);
        Tensor::ones([3, 4], device).set_require_grad(requires_grad)
    };
    let matrix = Param::uninitialized(ParamId::new(), draw, device.clone(), true, [3, 4].into());
    Net {
        matrix,
        ..Net::new(3, 4, 0, 1, &device)
    }
}

#[test]
fn a_parameter_is_drawn_when_it_is_cast_and_not_at_all_when_it_is_loaded() {
    let drawn = Arc::new(AtomicUsize::new(0));
    let count = || drawn.load(Ordering::Relaxed);
    let init = |net: &Net| {
        let groups = ProcessGroups::new(&Group::single(0), Layout::SINGLE).unwrap();
        let sharding = ShardingConfig::new(ShardingLevel::Parameters);
        let sharding = sharding.init(net, &groups).unwrap();
        AdamWConfig::new().init(&sharding).unwrap()
    };
    let net = lazy_net(&drawn);
    let mut optimizer = init(&net);
    assert_eq!(count(), 0);
    let net = optimizer.cast_params(net, FloatDType::BF16);
    assert_eq!((count(), f32_values(net.matrix.val())), (1, vec![1.0; 12]));

    let net = lazy_net(&drawn);
    let mut optimizer = init(&net);
    let read = |path: &str, shape: &[usize]| match path {
        "matrix" => Ok(TensorData::full(shape.to_vec(), 2.0f32)),
        _ => Err(format!("no {path}")),
    };
    let error = optimizer
        .load_params(net.clone(), FloatDType::BF16, read)
        .unwrap_err();
    assert_eq!(error, "no bias");
    let read =
        |_: &str, shape: &[usize]| Ok::<_, Infallible>(TensorData::full(shape.to_vec(), 2.0f32));
    let Ok(net) = optimizer.load_params(net, FloatDType::BF16, read);
    assert_eq!((count(), f32_values(net.matrix.val())), (1, vec![2.0; 12]));
    assert_eq!(values(optimizer.master("bias", unused).unwrap()), [2.0; 4]);
    assert!(net.matrix.val().is_require_grad());
}
