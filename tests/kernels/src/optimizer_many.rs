//! Tests of multi-tensor steps: many parameters in one launch.

use burn::{
    backend::Cube,
    prelude::Device,
    tensor::{DType, Tensor},
};
use burn_cubecl::tensor::CubeTensor;
use megaburn_cuda::{CudaError, CudaQueue, Op, tensor};
use megaburn_kernels::{
    AdamwState, AdamwStep, adamw, adamw_all, adamw_all_observed, adamw_scaled, bf16_out_slice,
};

use super::compare::{close, host, normal};

pub(super) const TESTS: &[super::Test] = &[
    ("many_are_stepped_as_one_by_one_to_the_bit", together),
    ("many_are_rounded_into_one_buffer", rooms),
    ("found_magnitudes_are_those_of_new_parameters", amaxes),
    ("steps_of_many_tell_what_failed", failed),
];

const STEP: AdamwStep = AdamwStep {
    lr: 1e-2,
    beta_1: 0.9,
    beta_2: 0.95,
    epsilon: 1e-8,
    weight_decay: 0.1,
    grad_factor: 0.3,
    time: 3,
};

/// Full chunks, partial chunks, lengths that are not in quads, and nothing.
const LENS: [usize; 8] = [4, 70_000, 65_536, 37, 131_076, 0, 8, 1200];

/// Random states, with a buffer for the rounded parameter if `rounded` is given. The moments of the
/// last state but one are narrow. The second parameter is a slice of a longer tensor, and so are
/// the third and its gradient, at aligned offsets where they are read in place.
fn states(device: &Device, rounded: Option<DType>) -> Vec<(AdamwState, Tensor<1>)> {
    let of = |(i, len): (usize, usize)| {
        let random = || Tensor::<1>::from_data(normal([len], DType::F32), device);
        let longer = || Tensor::<1>::from_data(normal([len + 7], DType::F32), device);
        let stretch = || Tensor::<1>::from_data(normal([len + 256], DType::F32), device);
        let param = match i {
            1 => longer().narrow(0, 3, len),
            2 => stretch().narrow(0, 128, len),
            _ => random(),
        };
        let grad = if i == 2 {
            stretch().narrow(0, 128, len)
        } else {
            random()
        };
        let exp_avg_sq = random().abs();
        let exp_avg_sq = if i == 6 {
            exp_avg_sq.cast(DType::BF16)
        } else {
            exp_avg_sq
        };
        let rounded = rounded.map(|dtype| Tensor::full([len], f32::NAN, (device, dtype)));
        (
            AdamwState {
                param,
                exp_avg: random(),
                exp_avg_sq,
                rounded,
            },
            grad,
        )
    };
    LENS.into_iter().enumerate().map(of).collect()
}

/// With a factor that is not finite, parameters stay as they are, and so do their magnitudes.
fn amaxes() -> Result<(), String> {
    let gpu = Device::cuda(0);
    for rounded in [None, Some(DType::BF16), Some(DType::F16)] {
        for factor in [0.7, f32::NAN] {
            let factor = Some(Tensor::<1>::from_floats([factor], &gpu));
            let all = states(&gpu, rounded);
            let quads = all.iter().map(|(state, grad)| {
                let len = grad.dims()[0];
                let is_wide = state.exp_avg_sq.dtype() == DType::F32;
                len > 0 && len.is_multiple_of(4) && is_wide
            });
            let quads: Vec<bool> = quads.collect();
            for (i, (state, amax)) in adamw_all_observed(all, factor, &STEP)
                .into_iter()
                .enumerate()
            {
                let what = format!("{rounded:?}, number {i}");
                // The second parameter is a copy, because its slice is at no aligned offset.
                if amax.is_some() != quads[i] {
                    return Err(format!("{what}: found: {}", amax.is_some()));
                }
                let Some(amax) = amax else { continue };
                let new = host(state.rounded.unwrap_or(state.param))?;
                let largest = new.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
                let found = host(amax)?;
                if found != [largest] {
                    return Err(format!("{what}: {found:?}, not {largest}"));
                }
            }
        }
    }
    Ok(())
}

fn together() -> Result<(), String> {
    let gpu = Device::cuda(0);
    for rounded in [None, Some(DType::BF16), Some(DType::F16)] {
        for factor in [None, Some(0.7), Some(f32::NAN)] {
            let factor = factor.map(|factor| Tensor::<1>::from_floats([factor], &gpu));
            let all = states(&gpu, rounded);
            for x in [&all[2].0.param, &all[2].1] {
                let start = cube(x.clone())?.handle.offset_start;
                if start != Some(512) {
                    return Err(format!("a stretch is at {start:?}: it was copied"));
                }
            }
            // Another reference to the third state's parameter exists.
            let held = all[2].0.param.clone();
            let before = host(held.clone())?;
            let copy = |x: &Tensor<1>| Tensor::from_data(x.clone().into_data(), (&gpu, x.dtype()));
            let copies = all.iter().map(|(state, grad)| {
                let AdamwState {
                    param,
                    exp_avg,
                    exp_avg_sq,
                    rounded,
                } = state;
                let rounded = rounded.as_ref().map(copy);
                let [param, exp_avg, exp_avg_sq] = [param, exp_avg, exp_avg_sq].map(copy);
                (
                    AdamwState {
                        param,
                        exp_avg,
                        exp_avg_sq,
                        rounded,
                    },
                    copy(grad),
                )
            });
            let copies: Vec<_> = copies.collect();
            let found = adamw_all(all, factor.clone(), &STEP);
            let expected = copies
                .into_iter()
                .map(|(state, grad)| match factor.clone() {
                    Some(factor) => adamw_scaled(state, grad, factor, &STEP),
                    None => adamw(state, grad, &STEP),
                });
            for (i, (found, expected)) in found.into_iter().zip(expected).enumerate() {
                let what = format!("{rounded:?} {factor:?}, number {i}");
                let narrow = found.exp_avg_sq.dtype() == DType::BF16;
                if narrow != (i == 6) || found.rounded.as_ref().map(|x| x.dtype()) != rounded {
                    return Err(format!("{what}: other dtypes"));
                }
                if let Some(rounded) = &found.rounded {
                    let again = found.param.clone().cast(rounded.dtype());
                    close(&what, &host(rounded.clone())?, &host(again)?, 0.0)?;
                }
                let of = |state: AdamwState| [state.param, state.exp_avg, state.exp_avg_sq];
                for (found, expected) in of(found).into_iter().zip(of(expected)) {
                    close(&what, &host(found)?, &host(expected)?, 0.0)?;
                }
            }
            if host(held)? != before {
                return Err("what is held has changed".into());
            }
        }
    }
    Ok(())
}

fn cube(x: Tensor<1>) -> Result<CubeTensor, String> {
    Ok(tensor::from_backend(
        x.try_into_primitive::<Cube>().map_err(|_| "no GPU's")?,
    ))
}

/// Rounds into slices of a buffer filled with NaN, some of them adjacent, and checks the buffer
/// through another reference; other parameters are not rounded.
fn rooms() -> Result<(), String> {
    let gpu = Device::cuda(0);
    for dtype in [DType::BF16, DType::F16] {
        let buffer = Tensor::<1>::full([8192], f32::NAN, (&gpu, dtype));
        let held = buffer.clone();
        let places = [256..4352, 4352..4608, 4608..5708, 6144..6148, 7680..8192];
        let mut all = states(&gpu, None);
        for place in &places {
            let random = || Tensor::<1>::from_data(normal([place.len()], DType::F32), &gpu);
            let param = random();
            let exp_avg = random();
            let exp_avg_sq = random().abs();
            let rounded = Some(bf16_out_slice(&buffer, place.clone()).ok_or("no room")?);
            all.insert(
                1,
                (
                    AdamwState {
                        param,
                        exp_avg,
                        exp_avg_sq,
                        rounded,
                    },
                    random(),
                ),
            );
        }
        let found = adamw_all(all, None, &STEP);
        let mut expected = vec![f32::NAN; 8192];
        for (place, state) in places.iter().rev().zip(&found[1..]) {
            let param = host(state.param.clone().cast(dtype))?;
            expected[place.clone()].copy_from_slice(&param);
            let rounded = state.rounded.clone().ok_or("it is not rounded")?;
            close(
                &format!("{place:?} in {dtype:?}"),
                &host(rounded)?,
                &param,
                0.0,
            )?;
        }
        if found[6..].iter().any(|state| state.rounded.is_some()) {
            return Err("others are rounded".into());
        }
        let found = host(held)?;
        let same = |(a, b): (&f32, &f32)| a == b || (a.is_nan() && b.is_nan());
        if let Some(at) = found.iter().zip(&expected).position(|x| !same(x)) {
            return Err(format!(
                "{dtype:?}: {at} is {}, not {}",
                found[at], expected[at]
            ));
        }
    }
    Ok(())
}

/// A gradient that could not be computed must not leave a result that looks valid.
fn failed() -> Result<(), String> {
    let gpu = Device::cuda(0);
    let all = states(&gpu, None);
    let gradient = all[4].1.clone();
    let gradient = cube(gradient)?;
    let queue = CudaQueue::of(&gradient).ok_or("no queue")?;
    let op = Op::new(|| "a gradient of this test".into()).writes(&gradient);
    queue.enqueue(op, |_, _| Err(CudaError::Refused("as it should".into())));
    let found = adamw_all(all, None, &STEP).swap_remove(4);
    match found.param.try_into_data() {
        Err(error) if error.to_string().contains("as it should") => Ok(()),
        Err(error) => Err(format!("another failure: {error}")),
        Ok(_) => Err("a step with a gradient that failed was made".into()),
    }
}
