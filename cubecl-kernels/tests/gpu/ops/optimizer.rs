//! What the optimizer does in one kernel each, against its definition on the CPU.

use burn::{
    prelude::Device,
    tensor::{Distribution, Tensor, TensorData},
};
use megaburn_kernels::{AdamwState, AdamwStep, adamw, partial_sums_of_squares, reference};

use super::compare::close;

pub(super) const TESTS: &[super::Test] =
    &[("adamw_is_its_definition", steps), ("sums_of_squares_are_whole_and_keep_nan", squares)];

/// Whole vectors of four, more than all cubes take at once, and what no vector divides.
const LENS: [usize; 4] = [1, 37, 4096, 1_200_003];

fn normal(len: usize) -> TensorData {
    Tensor::<1>::random([len], Distribution::Normal(0.0, 1.0), &Device::flex()).into_data()
}

fn host(x: Tensor<1>) -> Result<Vec<f32>, String> {
    let data = x.try_into_data().map_err(|error| error.to_string())?;
    data.try_to_vec().map_err(|error| format!("{error:?}"))
}

fn steps() -> Result<(), String> {
    for len in LENS {
        let [param, grad] = [0; 2].map(|_| normal(len));
        let run = |device: &Device, adamw: fn(_, _, &AdamwStep) -> AdamwState| {
            let on = |data: &TensorData| Tensor::<1>::from_data(data.clone(), device);
            let zeros = || Tensor::zeros([len], device);
            let mut state = AdamwState { param: on(&param), exp_avg: zeros(), exp_avg_sq: zeros() };
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
                state = adamw(state, on(&grad), &step);
            }
            Ok::<_, String>([
                host(state.param)?,
                host(state.exp_avg)?,
                host(state.exp_avg_sq)?,
                host(before)?,
            ])
        };
        let expected = run(&Device::flex(), reference::adamw)?;
        let found = run(&Device::cuda(0), adamw)?;
        let names = ["parameter", "exp_avg", "exp_avg_sq", "parameter before"];
        for ((name, found), expected) in names.into_iter().zip(&found).zip(&expected) {
            close(&format!("{name} of {len}"), found, expected, 2e-6)?;
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
        let bad = x.slice_fill(len - 1..len, f32::NAN);
        if !sum(bad)?.is_nan() {
            return Err(format!("NaN in the last of {len} is lost"));
        }
    }
    Ok(())
}
