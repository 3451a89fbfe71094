//! What the optimizer does in one kernel each, against its definition on the CPU.

use burn::{
    prelude::Device,
    tensor::{DType, Distribution, Tensor, TensorData},
};
use megaburn_kernels::{
    AdamwState, AdamwStep, adamw, adamw_scaled, partial_sums_of_squares, scaled, total,
};

use super::compare::{DTYPES, close, host};

pub(super) const TESTS: &[super::Test] = &[
    ("adamw_is_its_definition", steps),
    ("sums_of_squares_are_whole_and_keep_nan", squares),
    ("a_total_is_of_its_own_numbers", totals),
    ("scaling_is_a_product", scales),
    ("neighbours_in_memory_stay", neighbours),
];

/// Whole vectors of four, more than all cubes take at once, and what no vector divides.
const LENS: [usize; 4] = [1, 37, 4096, 1_200_003];

fn normal(len: usize) -> TensorData {
    Tensor::<1>::random([len], Distribution::Normal(0.0, 1.0), &Device::flex()).into_data()
}

fn steps() -> Result<(), String> {
    for (len, dtype, factor) in [
        (1, None, None),
        (37, Some(DType::BF16), None),
        (4096, Some(DType::F16), Some(0.7)),
        (4096, None, Some(0.7)),
        (1_200_003, Some(DType::BF16), Some(0.7)),
        (4096, Some(DType::BF16), Some(f32::NAN)),
        (37, None, Some(f32::INFINITY)),
    ] {
        let [param, grad] = [0; 2].map(|_| normal(len));
        let run = |device: &Device| {
            let on = |data: &TensorData| Tensor::<1>::from_data(data.clone(), device);
            let zeros = || Tensor::zeros([len], device);
            let rounded = dtype.map(|dtype| Tensor::ones([len], (device, dtype)));
            let mut state = AdamwState {
                param: on(&param),
                exp_avg: zeros(),
                exp_avg_sq: zeros(),
                rounded: rounded.clone(),
            };
            // Somebody else holds what the first step starts from, and must not see it change.
            let before = state.param.clone();
            for time in 1..=3 {
                let step = AdamwStep {
                    lr: 1e-2,
                    beta_1: 0.9,
                    beta_2: 0.95,
                    epsilon: 1e-8,
                    weight_decay: 0.1,
                    grad_factor: 0.3,
                    time,
                };
                state = match factor {
                    None => adamw(state, on(&grad), &step),
                    Some(factor) => {
                        let factor = Tensor::from_floats([factor], device);
                        adamw_scaled(state, on(&grad), factor, &step)
                    }
                };
            }
            let AdamwState { param, exp_avg, exp_avg_sq, rounded: after } = state;
            let mut found = vec![param, exp_avg, exp_avg_sq, before];
            if let (Some(after), Some(held)) = (after, rounded) {
                // The rounding of its own parameter, bit for bit.
                let again = found[0].clone().cast(after.dtype());
                found.extend([(again.cast(DType::F32) - after.cast(DType::F32)), held]);
            }
            found.into_iter().map(host).collect::<Result<Vec<_>, String>>()
        };
        let (expected, found) = (run(&Device::flex())?, run(&Device::cuda(0))?);
        let names = ["parameter", "exp_avg", "exp_avg_sq", "before", "rounding", "rounded before"];
        for ((name, found), expected) in names.into_iter().zip(&found).zip(&expected) {
            let tolerance = if name.starts_with("round") { 0.0 } else { 2e-6 };
            close(&format!("{name} of {len} {dtype:?} {factor:?}"), found, expected, tolerance)?;
        }
    }
    Ok(())
}

/// Also of a stretch of a longer tensor, and of fewer numbers than an allocation holds.
fn totals() -> Result<(), String> {
    for len in [1, 2, 3, 37, 1000] {
        let data = normal(len + 7);
        let all = Tensor::<1>::from_data(data.clone(), &Device::cuda(0));
        let numbers: Vec<f64> = data.iter::<f64>().collect();
        for start in [0, 5] {
            let stretch = all.clone().narrow(0, start, len);
            let expected: f64 = numbers[start..start + len].iter().sum();
            for stretch in [stretch.clone(), stretch + 0.0] {
                let found = host(total(stretch))?;
                close(&format!("{len} from {start}"), &found, &[expected as f32], 1e-6)?;
            }
        }
    }
    Ok(())
}

fn scales() -> Result<(), String> {
    for (dtype, _) in DTYPES {
        for len in LENS {
            let data = Tensor::<1>::from_data(normal(len), (&Device::flex(), dtype)).into_data();
            let run = |device: &Device, held: bool| {
                let x = Tensor::<1>::from_data(data.clone(), (device, dtype));
                let before = held.then(|| x.clone());
                let y = host(scaled(x, Tensor::from_floats([-0.37], device)))?;
                Ok::<_, String>((y, before.map(host).transpose()?))
            };
            let (expected, _) = run(&Device::flex(), false)?;
            let x = host(Tensor::<1>::from_data(data.clone(), &Device::flex()))?;
            for held in [false, true] {
                let (found, before) = run(&Device::cuda(0), held)?;
                close(&format!("{len} {dtype:?} scaled"), &found, &expected, 0.0)?;
                if before.is_some_and(|before| before != x) {
                    return Err(format!("{len} {dtype:?}: what is held has changed"));
                }
            }
        }
    }
    Ok(())
}

fn squares() -> Result<(), String> {
    let gpu = Device::cuda(0);
    let sum = |x: Tensor<1>| -> Result<f64, String> {
        Ok(host(partial_sums_of_squares(x))?.into_iter().map(f64::from).sum())
    };
    for len in LENS {
        let data = normal(len);
        let expected: f64 = data.iter::<f64>().map(|x| x * x).sum();
        let x = Tensor::<1>::from_data(data, &gpu);
        let found = sum(x.clone())?;
        let apart = (found - expected).abs() / expected;
        if apart.is_nan() || apart > 1e-5 {
            return Err(format!("squares of {len}: {found}, not {expected}"));
        }
        let all = Tensor::cat(vec![partial_sums_of_squares(x.clone()); 3], 0);
        let total = host(total(all))?[0];
        close("total", &[total], &[(3.0 * expected) as f32], 1e-5)?;
        let bad = x.slice_fill(len - 1..len, f32::NAN);
        if !sum(bad)?.is_nan() {
            return Err(format!("NaN in the last of {len} is lost"));
        }
    }
    Ok(())
}

/// Gradients as a reduction leaves them, parts of one buffer, and parameters that lie side by side: each
/// update is of its own numbers alone.
fn neighbours() -> Result<(), String> {
    const LEN: usize = 40;
    let gpu = Device::cuda(0);
    let all = normal(64 * LEN);
    let grads = Tensor::<1>::from_data(all.clone(), &gpu);
    let values: Vec<f32> = all.try_to_vec().map_err(|error| format!("{error:?}"))?;
    let fresh = || Tensor::<1>::zeros([LEN], &gpu) + 1.0;
    let mut params: Vec<_> = (0..16).map(|_| fresh()).collect();
    let step = AdamwStep {
        lr: 1e-2,
        beta_1: 0.9,
        beta_2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.0,
        grad_factor: 1.0,
        time: 1,
    };
    for i in 0..params.len() {
        let before = params.remove(0);
        let state = AdamwState {
            param: before,
            exp_avg: Tensor::zeros([LEN], &gpu),
            exp_avg_sq: Tensor::zeros([LEN], &gpu),
            rounded: None,
        };
        let grad = grads.clone().narrow(0, i * 64, LEN);
        params.push(adamw(state, grad, &step).param);
    }
    for (i, param) in params.into_iter().enumerate() {
        // The first step of Adam is the sign of the gradient.
        let expected: Vec<f32> =
            values[i * 64..i * 64 + LEN].iter().map(|grad| 1.0 - 1e-2 * grad.signum()).collect();
        close(&format!("parameter {i}"), &host(param)?, &expected, 1e-5)?;
    }
    Ok(())
}
