//! Compares the fused kernels of SGD and Lion with their definitions on the CPU.

use burn::{
    prelude::Device,
    tensor::{DType, Tensor, TensorData, s},
};
use megaburn_kernels::{
    LionState, LionStep, SgdState, SgdStep, is_on_gpu, lion, lion_scaled, sgd, sgd_scaled,
};

use super::compare::{DTYPES, close, host, normal};

pub(super) const TESTS: &[super::Test] = &[
    ("wide_steps_are_their_definitions", wide_steps),
    ("steps_of_narrow_state_are_their_definitions", narrow_steps),
    ("nan_stays_where_it_is", nan),
    ("stretches_are_stepped_and_their_neighbours_stay", stretches),
];

/// An optimizer with the numbers of its step.
#[derive(Clone, Copy, Debug)]
enum Rule {
    Sgd(SgdStep),
    Lion(LionStep),
}

/// Steps are as large as the gradients, so that each shows in a narrow parameter.
const SGD: SgdStep = SgdStep {
    lr: 0.1,
    momentum: 0.9,
    nesterov: false,
    weight_decay: 0.1,
    grad_factor: 0.7,
};
const LION: LionStep = LionStep {
    lr: 0.1,
    beta_1: 0.9,
    beta_2: 0.99,
    weight_decay: 0.1,
    grad_factor: 0.7,
};

/// All kernel variants of each optimizer.
const RULES: [Rule; 6] = [
    Rule::Sgd(SGD),
    Rule::Sgd(SgdStep {
        nesterov: true,
        ..SGD
    }),
    Rule::Sgd(SgdStep {
        weight_decay: 0.0,
        ..SGD
    }),
    Rule::Sgd(SgdStep {
        momentum: 0.0,
        ..SGD
    }),
    Rule::Lion(LION),
    Rule::Lion(LionStep {
        weight_decay: 0.0,
        ..LION
    }),
];

/// The state of an optimizer: the parameter, the mean or momentum, and the rounded parameter.
struct Held {
    param: Tensor<1>,
    kept: Option<Tensor<1>>,
    rounded: Option<Tensor<1>>,
}

impl Rule {
    fn keeps(&self) -> bool {
        !matches!(self, Self::Sgd(SgdStep { momentum: 0.0, .. }))
    }

    fn after(&self, held: Held, grad: Tensor<1>, factor: Option<Tensor<1>>) -> Held {
        let Held {
            param,
            kept,
            rounded,
        } = held;
        match self {
            Self::Sgd(step) => {
                let state = SgdState {
                    param,
                    momentum_buffer: kept,
                    rounded,
                };
                let SgdState {
                    param,
                    momentum_buffer: kept,
                    rounded,
                } = match factor {
                    None => sgd(state, grad, step),
                    Some(factor) => sgd_scaled(state, grad, factor, step),
                };
                Held {
                    param,
                    kept,
                    rounded,
                }
            }
            Self::Lion(step) => {
                let exp_avg = kept.expect("Lion keeps a mean");
                let state = LionState {
                    param,
                    exp_avg,
                    rounded,
                };
                let LionState {
                    param,
                    exp_avg,
                    rounded,
                } = match factor {
                    None => lion(state, grad, step),
                    Some(factor) => lion_scaled(state, grad, factor, step),
                };
                Held {
                    param,
                    kept: Some(exp_avg),
                    rounded,
                }
            }
        }
    }
}

/// The dtypes of gradient, parameter, and mean or momentum.
type Dtypes = [DType; 3];

fn wide_steps() -> Result<(), String> {
    for rule in RULES {
        for (len, rounded, factor) in [
            (1, None, None),
            (37, Some(DType::BF16), None),
            (4096, Some(DType::F16), Some(0.7)),
            (4096, None, Some(0.7)),
            (120_003, Some(DType::BF16), Some(0.7)),
            (4096, Some(DType::BF16), Some(f32::NAN)),
            (37, Some(DType::F16), Some(f32::NEG_INFINITY)),
            (37, None, Some(f32::INFINITY)),
        ] {
            steps(rule, len, [DType::F32; 3], rounded, factor)?;
        }
    }
    Ok(())
}

fn narrow_steps() -> Result<(), String> {
    let whole = DType::F32;
    let bf16 = DType::BF16;
    let f16 = DType::F16;
    for rule in RULES {
        for (len, dtypes, rounded, factor) in [
            (37, [bf16; 3], None, None),
            (4096, [bf16; 3], None, Some(0.7)),
            (4, [bf16; 3], None, Some(f32::NAN)),
            (2048, [whole, bf16, bf16], None, Some(0.7)),
            (2052, [bf16, whole, bf16], Some(bf16), None),
            (8200, [bf16, whole, whole], Some(bf16), Some(0.7)),
            (41, [f16, f16, whole], None, Some(0.7)),
            (8200, [f16, whole, bf16], Some(f16), None),
            (4096, [f16; 3], None, None),
        ] {
            steps(rule, len, dtypes, rounded, factor)?;
        }
    }
    Ok(())
}

/// Compares three steps on the GPU and on the CPU, each with its own gradient.
fn steps(
    rule: Rule,
    len: usize,
    dtypes: Dtypes,
    rounded: Option<DType>,
    factor: Option<f32>,
) -> Result<(), String> {
    // A mean as small as the gradient's share of it, so that the sign depends on both.
    let small = if matches!(rule, Rule::Lion(_)) {
        0.0625
    } else {
        1.0
    };
    let param = normal([len], dtypes[1]);
    let kept = normal([len], dtypes[2]);
    let kept = Tensor::<1>::from_data(kept, &Device::flex())
        .mul_scalar(small)
        .into_data();
    let grads = [0; 3].map(|_| normal([len], dtypes[0]));
    let run = |device: &Device| {
        let on = |data: &TensorData, dtype| Tensor::<1>::from_data(data.clone(), (device, dtype));
        // The old contents of the buffer for the rounded parameter must not affect the result.
        let poison = rounded.map(|dtype| Tensor::full([len], f32::NAN, (device, dtype)));
        let mut held = Held {
            param: on(&param, dtypes[1]),
            kept: rule.keeps().then(|| on(&kept, dtypes[2])),
            rounded: poison.clone(),
        };
        // Another reference to the initial state exists and must not see it change.
        let before = (held.param.clone(), held.kept.clone());
        for grad in &grads {
            let factor = factor.map(|factor| Tensor::from_floats([factor], device));
            held = rule.after(held, on(grad, dtypes[0]), factor);
        }
        let Held {
            param,
            kept,
            rounded: after,
        } = held;
        let found = [Some(&param), kept.as_ref(), after.as_ref()].map(|x| x.map(|x| x.dtype()));
        if found != [Some(dtypes[1]), rule.keeps().then_some(dtypes[2]), rounded] {
            return Err(format!("{dtypes:?} {rounded:?} became {found:?}"));
        }
        // The result must be the rounded new parameter, bit for bit; on the GPU in the given
        // memory.
        let rounding = after.zip(poison).map(|(after, given)| {
            let after = if is_on_gpu(&given) { given } else { after };
            param.clone().cast(after.dtype()).cast(DType::F32) - after.cast(DType::F32)
        });
        let (param_before, kept_before) = before;
        let all = [Some(param), kept, Some(param_before), kept_before, rounding];
        let all = all.map(|x| x.map(host).transpose());
        all.into_iter()
            .collect::<Result<Vec<Option<Vec<f32>>>, String>>()
    };
    let expected = run(&Device::flex())?;
    let found = run(&Device::cuda(0))?;
    let names = [
        "parameter",
        "what is kept",
        "parameter before",
        "kept before",
        "rounding",
    ];
    let of = |dtype| {
        DTYPES
            .iter()
            .find(|(known, _)| *known == dtype)
            .expect("it is known")
            .1
    };
    let of = |dtype| if dtype == DType::F32 { 2e-6 } else { of(dtype) };
    // A change in the last bit of the momentum also shows in SGD's parameter.
    let tolerances = [
        of(dtypes[1]).max(of(dtypes[2])),
        of(dtypes[2]),
        0.0,
        0.0,
        0.0,
    ];
    for (i, (found, expected)) in found.into_iter().zip(expected).enumerate() {
        let what = format!(
            "{} of {rule:?} {len} {dtypes:?} {rounded:?} {factor:?}",
            names[i]
        );
        let (Some(mut found), Some(mut expected)) = (found, expected) else {
            continue;
        };
        if let (0, Rule::Lion(step)) = (i, rule) {
            forgive(&mut found, &expected, step.lr);
        }
        // An element may be the small difference of terms that cancel. Compare its rounding error
        // with the terms, which are about 1, and not with the difference.
        found.push(1.0);
        expected.push(1.0);
        close(&what, &found, &expected, tolerances[i])?;
    }
    Ok(())
}

/// Ignores some differences of Lion's steps. A sum that is 0 up to rounding has either sign or
/// none, so among thousands of elements Lion may step one in the other direction or not at all;
/// among fewer, none.
fn forgive(found: &mut [f32], expected: &[f32], lr: f64) {
    let strays = found.iter_mut().zip(expected).filter(|(a, b)| {
        let apart = f64::from((**a - **b).abs()) / lr;
        (0.5..2.5).contains(&apart)
    });
    for (found, expected) in strays.take(expected.len() / 2000) {
        *found = *expected;
    }
}

/// Zeros, NaN and infinities as gradients: 0 has no sign, and NaN does not become a sign.
fn nan() -> Result<(), String> {
    let numbers = [
        0.0,
        -0.0,
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        3.0,
        -3.0,
        0.0,
    ];
    for (rule, len) in RULES.into_iter().flat_map(|rule| [(rule, 8), (rule, 7)]) {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let run = |device: &Device| {
                let held = Held {
                    param: Tensor::ones([len], device),
                    kept: rule.keeps().then(|| Tensor::zeros([len], (device, dtype))),
                    rounded: None,
                };
                let data = TensorData::from(&numbers[..len]);
                let grad = Tensor::from_data(data, (device, dtype));
                let Held { param, kept, .. } = rule.after(held, grad, None);
                Ok::<_, String>((
                    host(param)?,
                    kept.map(host).transpose()?.unwrap_or_default(),
                ))
            };
            let expected = run(&Device::flex())?;
            let found = run(&Device::cuda(0))?;
            let of = |(param, kept): (Vec<f32>, Vec<f32>)| [param, kept].concat();
            let expected = of(expected);
            let found = of(found);
            let same = found.iter().zip(&expected).all(|(a, b)| {
                a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= 1e-2 * b.abs()
            });
            if !same || found.len() != expected.len() || !found[2].is_nan() {
                return Err(format!("{rule:?} {dtype:?}: {found:?}, not {expected:?}"));
            }
        }
    }
    Ok(())
}

/// Operands within a buffer of NaN: some are read in place (at least 256 bytes from the start and
/// from the end), others are copied.
fn stretches() -> Result<(), String> {
    let gpu = Device::cuda(0);
    for (rule, (start, len)) in RULES
        .into_iter()
        .flat_map(|rule| [(128, 40), (5, 40), (128, 37), (3, 1)].map(|stretch| (rule, stretch)))
    {
        for dtype in [DType::F32, DType::BF16] {
            let data = [0; 3].map(|_| normal([len], dtype));
            let alone = data
                .each_ref()
                .map(|data| Tensor::<1>::from_data(data.clone(), (&gpu, dtype)));
            let place = s![start..start + len];
            let all = alone.clone().map(|x| {
                let nan = Tensor::<1>::full([len + 2 * start], f32::NAN, (&gpu, dtype));
                nan.slice_assign(place, x)
            });
            let after = |[grad, param, kept]: [Tensor<1>; 3]| {
                let kept = rule.keeps().then_some(kept);
                let after = rule.after(
                    Held {
                        param,
                        kept,
                        rounded: None,
                    },
                    grad,
                    None,
                );
                let all = [Some(after.param), after.kept];
                host(Tensor::cat(all.into_iter().flatten().collect(), 0))
            };
            let what = format!("{rule:?} {len} from {start} {dtype:?}");
            let cut = after(all.clone().map(|x| x.slice(place)))?;
            close(&what, &cut, &after(alone)?, 0.0)?;
            for (all, data) in all.into_iter().zip(data) {
                let all = host(all)?;
                let data: Vec<f32> = data.iter().collect();
                let inside = &all[start..start + len];
                let outside = [&all[..start], &all[start + len..]].concat();
                if inside != data || !outside.iter().all(|x| x.is_nan()) {
                    return Err(format!("{what}: what is held has changed"));
                }
            }
        }
    }
    Ok(())
}
