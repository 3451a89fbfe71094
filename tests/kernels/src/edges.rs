//! Tests of edge cases: tensors without elements, invalid tokens, operands on two devices.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::{
    prelude::{Device, Int},
    tensor::{DType, Tensor, TensorData},
};
use megaburn_autograd::{MainGrad, backward_from};
use megaburn_kernels::*;
use megaburn_mesh::{PositionRng, Purpose};

use super::compare::*;

pub(super) const TESTS: &[super::Test] = &[
    ("no_tokens_give_none_and_gradients_of_0", nothing),
    ("optimizers_of_nothing", steps_of_nothing),
    ("tokens_that_are_none_are_not_a_number", unknown),
    ("operands_of_two_devices_are_refused", two_devices),
    (
        "what_is_differentiated_is_stepped_without_its_graph",
        differentiated,
    ),
];

fn nothing() -> Result<(), String> {
    for (dtype, tolerance) in DTYPES {
        for out_in in [false, true] {
            let w = if out_in { [3, 4] } else { [4, 3] };
            compare!("linear", dtype, tolerance, [x: [0, 2, 4], w: w, bias: [3]], |_, x, w, bias| {
                linear::<3>(x, w, Some(bias), LinearOptions { out_in, ..Default::default() })
            });
        }
        compare!("bias_gelu", dtype, tolerance, [x: [0, 8], bias: [8]], |_, x, bias| {
            bias_gelu::<2>(x, bias)
        });
        compare!("swiglu", dtype, tolerance, [x: [2, 0]], |_, x| swiglu::<2>(x));
        compare!("weighted", dtype, tolerance, [x: [0, 8], weight: [0]], |_, x, weight| {
            swiglu_weighted::<2>(x, weight)
        });
        compare!("norm", dtype, tolerance, [x: [0, 8], gamma: [8], beta: [8]], |_, x, gamma, beta| {
            layer_norm::<2>(x, gamma, Some(beta), 1e-5)
        });
        for p in [0.0, 0.5] {
            compare!("dropout", dtype, tolerance, [x: [0, 8], bias: [8], y: [0, 8]], |_, x, bias, y| {
                let rng = PositionRng::new(1, Purpose::Dropout, "x");
                bias_dropout_add::<2>(x, Some(bias), y, p, DropoutKey::new(rng, &[4, 8]))
            });
        }
        compare!("softmax", dtype, tolerance, [x: [1, 2, 0, 4]], |_, x| {
            scale_mask_softmax(x, SoftmaxMask::Causal, 1.0)
        });
        compare!("rope", dtype, tolerance, [x: [3, 0, 2, 4]], |device: &Device, x| {
            apply_rope(x, &RopeConfig::new(4).init(0..3, device).expect("it can be"))
        });
        compare!("embedding", dtype, tolerance, [table: [4, 8]], |device: &Device, table| {
            let ids = Tensor::<2, Int>::empty([0, 2], device);
            embedding(table, ids, EmbeddingOptions::default())
        });
        compare!("split", dtype, tolerance, [x: [0, 8]], |_, x| {
            let [a, _, b] = split_last::<2, 3>(x, [2, 0, 6]);
            Tensor::cat(vec![a, b], 1)
        });
    }
    let main_grad = MainGrad::default();
    main_grad.attach();
    for rows in [0, 2, 0] {
        let x = Tensor::<2>::ones([rows, 4], &Device::cuda(0).autodiff());
        let w = Tensor::<2>::ones([4, 3], &x.device()).require_grad();
        let options = LinearOptions {
            main_grad: Some(main_grad.clone()),
            ..Default::default()
        };
        linear(x, w, None, options).sum().backward();
    }
    let sum = main_grad.take().ok_or("no main gradient")?;
    close("main gradient", &host(sum)?, &[2.0; 12], 0.0)
}

const STEP: AdamwStep = AdamwStep {
    lr: 1e-2,
    beta_1: 0.9,
    beta_2: 0.95,
    epsilon: 1e-8,
    weight_decay: 0.1,
    grad_factor: 1.0,
    time: 1,
};

fn state(of: impl Fn() -> Tensor<1>) -> AdamwState {
    AdamwState {
        param: of(),
        exp_avg: of(),
        exp_avg_sq: of(),
        rounded: None,
    }
}

const SGD: SgdStep = SgdStep {
    lr: 1e-2,
    momentum: 0.9,
    nesterov: false,
    weight_decay: 0.1,
    grad_factor: 1.0,
};

fn sgd_state(of: impl Fn() -> Tensor<1>) -> SgdState {
    SgdState {
        param: of(),
        momentum_buffer: Some(of()),
        rounded: Some(of()),
    }
}

const LION: LionStep = LionStep {
    lr: 1e-2,
    beta_1: 0.9,
    beta_2: 0.99,
    weight_decay: 0.1,
    grad_factor: 1.0,
};

fn lion_state(of: impl Fn() -> Tensor<1>) -> LionState {
    LionState {
        param: of(),
        exp_avg: of(),
        rounded: Some(of()),
    }
}

fn steps_of_nothing() -> Result<(), String> {
    let device = Device::cuda(0);
    let none = || Tensor::<1>::empty([0], &device);
    let one = || Tensor::<1>::ones([1], &device);
    let dims = [
        adamw_scaled(state(none), none(), one(), &STEP).param,
        sgd_scaled(sgd_state(none), none(), one(), &SGD).param,
        lion_scaled(lion_state(none), none(), one(), &LION).param,
        scaled(none(), one()),
    ]
    .map(|x| x.dims());
    let sums = host(total(Tensor::cat(
        vec![partial_sums_of_squares(vec![none()]), total(none())],
        0,
    )))?;
    match (dims, sums.as_slice()) {
        ([[0], [0], [0], [0]], [0.0]) => Ok(()),
        _ => Err(format!("{dims:?} {sums:?}")),
    }
}

/// An id outside of an unsharded table, and labels that are not tokens.
fn unknown() -> Result<(), String> {
    let device = Device::cuda(0).autodiff();
    let tokens = |tokens: [i64; 4]| {
        let data = TensorData::new(tokens.to_vec(), [2, 2]);
        Tensor::<2, Int>::from_data(data, &device.clone().inner())
    };
    let is_nan = |x: Vec<f32>| {
        x.chunks(x.len() / 4)
            .map(|x| x[0].is_nan())
            .collect::<Vec<_>>()
    };
    for dtype in [DType::F32, DType::BF16] {
        let table: Tensor<2> = leaf(&normal([7, 4], dtype), &device, dtype);
        let vectors = embedding(table, tokens([0, 7, 6, -1]), EmbeddingOptions::default());
        let logits: Tensor<3> = leaf(&normal([2, 2, 9], dtype), &device, dtype);
        let options = CrossEntropyOptions {
            smoothing: 0.1,
            ..CrossEntropyOptions::new(7)
        };
        let losses = cross_entropy(logits.clone(), tokens([0, 7, -100, -1]), options, |own| own);
        let found = [is_nan(host(vectors)?), is_nan(host(losses.clone())?)];
        let grad = logits.grad(&losses.sum().backward()).ok_or("no gradient")?;
        let found = [found[0].clone(), found[1].clone(), is_nan(host(grad)?)];
        if found
            .iter()
            .any(|found| found[..] != [false, true, false, true])
        {
            return Err(format!("{dtype:?}: {found:?}"));
        }
    }
    Ok(())
}

fn refused(name: &str, call: impl FnOnce()) -> Result<(), String> {
    let panic = catch_unwind(AssertUnwindSafe(call))
        .err()
        .ok_or(format!("{name}: not refused"))?;
    let said = panic.downcast_ref::<String>().cloned().unwrap_or_default();
    if said.starts_with(name) && said.ends_with("move one of them") {
        Ok(())
    } else {
        Err(format!("{name}: {said:?}"))
    }
}

fn two_devices() -> Result<(), String> {
    let cpu = &Device::flex();
    let gpu = &Device::cuda(0);
    let ones = |device: &Device| Tensor::<1>::ones([4], device);
    let rows = |device: &Device| Tensor::<2>::ones([2, 4], device);
    let heads = |device: &Device| Tensor::<4>::ones([2, 1, 2, 4], device);
    let tokens = |device: &Device| Tensor::<2, Int>::zeros([1, 2], device);
    for (here, there) in [(cpu, gpu), (gpu, cpu)] {
        refused("rms_norm:", || {
            drop(rms_norm(rows(here), ones(there), 1e-5))
        })?;
        refused("layer_norm:", || {
            drop(layer_norm(rows(here), ones(here), Some(ones(there)), 1e-5))
        })?;
        refused("rms_norm_add:", || {
            drop(rms_norm_add(rows(here), rows(there), ones(here), 1e-5))
        })?;
        refused("bias_gelu:", || drop(bias_gelu(rows(here), ones(there))))?;
        refused("swiglu_weighted:", || {
            drop(swiglu_weighted(rows(here), Tensor::ones([2], there)))
        })?;
        refused("bias_dropout_add:", || {
            let key = DropoutKey::new(PositionRng::new(1, Purpose::Dropout, "x"), &[2, 4]);
            bias_dropout_add(rows(here), None, rows(there), 0.1, key);
        })?;
        refused("linear:", || {
            linear(
                rows(here),
                Tensor::ones([4, 4], there),
                None,
                LinearOptions::default(),
            );
        })?;
        refused("embedding:", || {
            embedding(rows(here), tokens(there), EmbeddingOptions::default());
        })?;
        refused("cross_entropy:", || {
            let options = CrossEntropyOptions::new(4);
            cross_entropy(
                Tensor::ones([1, 2, 4], here),
                tokens(there),
                options,
                |own| own,
            );
        })?;
        refused("cross_entropy:", || {
            let options = CrossEntropyOptions::new(4);
            let there = there.clone();
            let exchange = |own: Tensor<3>| own.to_device(&there);
            cross_entropy(
                Tensor::ones([1, 2, 4], here),
                tokens(here),
                options,
                exchange,
            );
        })?;
        refused("attention:", || {
            attention(
                heads(here),
                heads(there),
                heads(here),
                AttentionOptions::causal(),
            );
        })?;
        refused("apply_rope:", || {
            let table = RopeConfig::new(4).init(0..2, there).expect("it can be");
            apply_rope(heads(here), &table);
        })?;
        refused("scale_mask_softmax:", || {
            let mask = Tensor::<4, Int>::zeros([2, 1, 2, 4], there).bool();
            scale_mask_softmax(heads(here), SoftmaxMask::Masked(mask), 1.0);
        })?;
        refused("backward_from:", || {
            drop(backward_from(rows(here), rows(there)))
        })?;
        refused("adamw:", || {
            drop(adamw(state(|| ones(there)), ones(here), &STEP))
        })?;
        refused("sgd:", || {
            drop(sgd(sgd_state(|| ones(there)), ones(here), &SGD))
        })?;
        refused("lion:", || {
            drop(lion(lion_state(|| ones(there)), ones(here), &LION))
        })?;
        refused("lion_scaled:", || {
            let state = lion_state(|| ones(here));
            let factor = Tensor::ones([1], there);
            lion_scaled(state, ones(here), factor, &LION);
        })?;
        refused("scaled:", || {
            drop(scaled(ones(here), Tensor::ones([1], there)))
        })?;
    }
    Ok(())
}

fn differentiated() -> Result<(), String> {
    let gpu = Device::cuda(0);
    let data = [0; 2].map(|_| normal([9], DType::F32));
    let after = |device: &Device| {
        let of = |data: &TensorData| Tensor::<1>::from_data(data.clone(), device);
        let param = || of(&data[0]).abs();
        let grad = || of(&data[1]);
        let after = [
            adamw(state(param), grad(), &STEP).param,
            sgd(sgd_state(param), grad(), &SGD).param,
            lion(lion_state(param), grad(), &LION).param,
        ];
        host(Tensor::cat(after.to_vec(), 0))
    };
    close(
        "param",
        &after(&gpu.clone().autodiff())?,
        &after(&gpu)?,
        0.0,
    )
}
