//! Tests of steps that round into a slice of a larger buffer.

use std::ops::Range;

use burn::{
    prelude::Device,
    tensor::{DType, Tensor},
};
use megaburn_kernels::{
    AdamwState, AdamwStep, LionState, LionStep, SgdState, SgdStep, adamw, bf16_out_slice, lion, sgd,
};

use super::compare::{host, normal};

pub(super) const TESTS: &[super::Test] = &[
    ("steps_round_where_they_are_told_and_nowhere_else", rooms),
    ("no_room_is_where_memory_is_not_cut", refused),
];

/// One step from zeros; returns the new parameter and the rounded one.
type Rule = fn(Tensor<1>, Tensor<1>, Tensor<1>) -> (Tensor<1>, Option<Tensor<1>>);

const RULES: [(&str, Rule); 3] = [
    ("adamw", |param, rounded, grad| {
        let lr = 0.1;
        let beta_1 = 0.9;
        let beta_2 = 0.95;
        let epsilon = 1e-8;
        let weight_decay = 0.1;
        let grad_factor = 0.7;
        let time = 1;
        let step = AdamwStep {
            lr,
            beta_1,
            beta_2,
            epsilon,
            weight_decay,
            grad_factor,
            time,
        };
        let [exp_avg, exp_avg_sq] = [0; 2].map(|_| param.zeros_like());
        let after = adamw(
            AdamwState {
                param,
                exp_avg,
                exp_avg_sq,
                rounded: Some(rounded),
            },
            grad,
            &step,
        );
        (after.param, after.rounded)
    }),
    ("sgd", |param, rounded, grad| {
        let lr = 0.1;
        let momentum = 0.9;
        let nesterov = false;
        let weight_decay = 0.1;
        let grad_factor = 0.7;
        let step = SgdStep {
            lr,
            momentum,
            nesterov,
            weight_decay,
            grad_factor,
        };
        let momentum_buffer = Some(param.zeros_like());
        let after = sgd(
            SgdState {
                param,
                momentum_buffer,
                rounded: Some(rounded),
            },
            grad,
            &step,
        );
        (after.param, after.rounded)
    }),
    ("lion", |param, rounded, grad| {
        let lr = 0.1;
        let beta_1 = 0.9;
        let beta_2 = 0.99;
        let weight_decay = 0.1;
        let grad_factor = 0.7;
        let step = LionStep {
            lr,
            beta_1,
            beta_2,
            weight_decay,
            grad_factor,
        };
        let exp_avg = param.zeros_like();
        let after = lion(
            LionState {
                param,
                exp_avg,
                rounded: Some(rounded),
            },
            grad,
            &step,
        );
        (after.param, after.rounded)
    }),
];

/// Slices of a buffer of NaN. Two end inside a vector, and at no multiple of CubeCL's alignment;
/// one ends at the start of the next slice, and one at the end of the buffer.
fn rooms() -> Result<(), String> {
    let gpu = Device::cuda(0);
    const LEN: usize = 256 * 9 + 3;
    let parts: [Range<usize>; 4] = [0..37, 256..512, 512..1793, 2048..LEN];
    for (name, rule) in RULES {
        for dtype in [DType::BF16, DType::F16] {
            let buffer = Tensor::<1>::full([LEN], f32::NAN, (&gpu, dtype));
            let held = buffer.clone();
            let mut expected = vec![f32::NAN; LEN];
            for part in &parts {
                let what = format!("{name} to {part:?} in {dtype:?}");
                let [param, grad] =
                    [0; 2].map(|_| Tensor::<1>::from_data(normal([part.len()], DType::F32), &gpu));
                let room =
                    bf16_out_slice(&buffer, part.clone()).ok_or(format!("{what}: no room"))?;
                let (param, rounded) = rule(param, room, grad);
                let rounded = rounded.filter(|x| x.dims() == [part.len()] && x.dtype() == dtype);
                let rounded = host(rounded.ok_or(format!("{what}: another tensor"))?)?;
                expected[part.clone()].copy_from_slice(&host(param.cast(dtype))?);
                if rounded != expected[part.clone()] {
                    return Err(format!("{what}: it is not the rounded parameter"));
                }
                for (whose, found) in [("buffer", &buffer), ("clone", &held)] {
                    let found = host(found.clone())?;
                    let same = |(a, b): (&f32, &f32)| a == b || (a.is_nan() && b.is_nan());
                    if let Some(at) = found.iter().zip(&expected).position(|x| !same(x)) {
                        let found = found[at];
                        let expected = expected[at];
                        return Err(format!("{what}: {whose} {at} is {found}, not {expected}"));
                    }
                }
            }
        }
    }
    Ok(())
}

fn refused() -> Result<(), String> {
    let of = |device: &Device| Tensor::<1>::zeros([1000], (device, DType::BF16));
    for part in [5..37, 128..256, 512..1001, 1024..1025] {
        if bf16_out_slice(&of(&Device::cuda(0)), part.clone()).is_some() {
            return Err(format!("there is room in {part:?} of 1000"));
        }
    }
    match bf16_out_slice(&of(&Device::flex()), 0..256) {
        None => Ok(()),
        Some(_) => Err("there is room on a CPU".into()),
    }
}
