//! Compares the optimizer's fused kernels with their definitions on the CPU.

use burn::{
    prelude::Device,
    tensor::{DType, Distribution, Tensor, TensorData},
};
use megaburn_kernels::{
    AdamwState, AdamwStep, adamw, adamw_scaled, is_on_gpu, partial_sums_of_squares, scaled, total,
};

use super::compare::{DTYPES, close, host};

pub(super) const TESTS: &[super::Test] = &[
    ("adamw_is_its_definition", wide_steps),
    ("adamw_of_narrow_state_is_its_definition", narrow_steps),
    ("sums_of_squares_are_whole_and_keep_nan", squares),
    ("a_total_is_of_its_own_numbers", totals),
    ("scaling_is_a_product", scales),
    ("neighbours_in_memory_stay", neighbours),
];

/// Lengths in full vectors of four, lengths that no vector divides, and more than all cubes take at
/// once.
const LENS: [usize; 4] = [1, 37, 4096, 1_200_003];

fn normal(len: usize) -> TensorData {
    Tensor::<1>::random([len], Distribution::Normal(0.0, 1.0), &Device::flex()).into_data()
}

/// The dtypes of gradient, parameter and both moments.
type State = [DType; 4];

fn wide_steps() -> Result<(), String> {
    let state = [DType::F32; 4];
    for (len, rounded, factor) in [
        (1, None, None),
        (37, Some(DType::BF16), None),
        (4096, Some(DType::F16), Some(0.7)),
        (4096, None, Some(0.7)),
        (1_200_003, Some(DType::BF16), Some(0.7)),
        (4096, Some(DType::BF16), Some(f32::NAN)),
        (37, None, Some(f32::INFINITY)),
    ] {
        steps(len, state, rounded, factor)?;
    }
    Ok(())
}

fn narrow_steps() -> Result<(), String> {
    let whole = DType::F32;
    let bf16 = DType::BF16;
    let f16 = DType::F16;
    for (len, state, rounded, factor) in [
        (37, [bf16; 4], None, None),
        (4096, [bf16; 4], None, Some(0.7)),
        (1_200_003, [bf16; 4], None, Some(0.7)),
        (4, [bf16; 4], None, Some(f32::NAN)),
        (2048, [whole, bf16, bf16, bf16], None, Some(0.7)),
        (2052, [bf16, whole, bf16, whole], Some(bf16), None),
        (41, [f16, f16, f16, whole], None, Some(0.7)),
        (8200, [f16, whole, whole, bf16], Some(f16), None),
    ] {
        steps(len, state, rounded, factor)?;
    }
    Ok(())
}

/// Compares three steps on the GPU and on the CPU.
fn steps(
    len: usize,
    state: State,
    rounded: Option<DType>,
    factor: Option<f32>,
) -> Result<(), String> {
    let dtypes = state;
    let [param, grad] = [0; 2].map(|_| normal(len));
    let run = |device: &Device| {
        let on = |data: &TensorData, dtype| Tensor::<1>::from_data(data.clone(), (device, dtype));
        let zeros = |dtype| Tensor::zeros([len], (device, dtype));
        let rounded = rounded.map(|dtype| Tensor::ones([len], (device, dtype)));
        let mut state = AdamwState {
            param: on(&param, dtypes[1]),
            exp_avg: zeros(dtypes[2]),
            exp_avg_sq: zeros(dtypes[3]),
            rounded: rounded.clone(),
        };
        // Another reference to the initial parameter exists and must not see it change.
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
            let grad = on(&grad, dtypes[0]);
            state = match factor {
                None => adamw(state, grad, &step),
                Some(factor) => {
                    adamw_scaled(state, grad, Tensor::from_floats([factor], device), &step)
                }
            };
        }
        let AdamwState {
            param,
            exp_avg,
            exp_avg_sq,
            rounded: after,
        } = state;
        if [&param, &exp_avg, &exp_avg_sq].map(|x| x.dtype()) != dtypes[1..] {
            return Err(format!("{dtypes:?} became other dtypes"));
        }
        let mut found = vec![param, exp_avg, exp_avg_sq, before];
        if let (Some(after), Some(held)) = (after, rounded) {
            // The result must be the rounded new parameter, bit for bit; on the GPU in the given
            // memory.
            let again = found[0].clone().cast(after.dtype());
            let held = if is_on_gpu(&held) {
                held
            } else {
                after.clone()
            };
            let [again, after, held] = [again, after, held].map(|x| x.cast(DType::F32));
            found.extend([again - after.clone(), held - after]);
        }
        found
            .into_iter()
            .map(host)
            .collect::<Result<Vec<_>, String>>()
    };
    let expected = run(&Device::flex())?;
    let found = run(&Device::cuda(0))?;
    let names = [
        "parameter",
        "exp_avg",
        "exp_avg_sq",
        "before",
        "rounding",
        "what was given",
    ];
    let of = |dtype| {
        DTYPES
            .iter()
            .find(|(known, _)| *known == dtype)
            .expect("it is known")
            .1
    };
    let of = |dtype| if dtype == DType::F32 { 2e-6 } else { of(dtype) };
    // A change in the last bit of a narrow moment also shows in the parameter.
    let of_moments = of(dtypes[2]).max(of(dtypes[3]));
    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let tolerance = match i {
            0 => of(dtypes[1]).max(of_moments),
            1 | 2 => of(dtypes[i + 1]),
            _ => 0.0,
        };
        let what = format!("{} of {len} {dtypes:?} {rounded:?} {factor:?}", names[i]);
        close(&what, found, expected, tolerance)?;
    }
    // A step is much smaller than the largest parameter. So compare the change by itself, up to one
    // bit of the parameter, 1/256 of at most 5, or of the moments.
    let moved = |all: &[Vec<f32>]| {
        all[0]
            .iter()
            .zip(&all[3])
            .map(|(a, b)| a - b)
            .collect::<Vec<f32>>()
    };
    let found = moved(&found);
    let expected = moved(&expected);
    let largest = expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let apart = found
        .iter()
        .zip(&expected)
        .map(|(a, b)| f64::from((a - b).abs()));
    let mean = apart.sum::<f64>() / len as f64;
    let bound = 0.1 * f64::from(largest);
    if mean > bound {
        return Err(format!(
            "updates of {len} {dtypes:?} are {mean:.1e} apart, allowed {bound:.1e}"
        ));
    }
    Ok(())
}

/// Totals of full tensors, of ranges of longer tensors, and of fewer numbers than an allocation
/// holds.
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
                close(
                    &format!("{len} from {start}"),
                    &found,
                    &[expected as f32],
                    1e-6,
                )?;
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
    let sum_of = |all: Vec<Tensor<1>>| -> Result<f64, String> {
        Ok(host(partial_sums_of_squares(all))?
            .into_iter()
            .map(f64::from)
            .sum())
    };
    let sum = |x: Tensor<1>| sum_of(vec![x]);
    let dtypes = DTYPES.map(|(dtype, _)| dtype);
    for (len, dtype) in LENS
        .into_iter()
        .flat_map(|len| dtypes.map(|dtype| (len, dtype)))
    {
        let data = Tensor::<1>::from_data(normal(len), (&Device::flex(), dtype)).into_data();
        let expected: f64 = data.iter::<f64>().map(|x| x * x).sum();
        let x = Tensor::<1>::from_data(data, (&gpu, dtype));
        let found = sum(x.clone())?;
        let apart = (found - expected).abs() / expected;
        if apart.is_nan() || apart > 1e-5 {
            return Err(format!(
                "squares of {len} {dtype:?}: {found}, not {expected}"
            ));
        }
        let all = Tensor::cat(vec![partial_sums_of_squares(vec![x.clone()]); 3], 0);
        let total = host(total(all))?[0];
        close("total", &[total], &[(3.0 * expected) as f32], 1e-5)?;
        let bad = x.slice_fill(len - 1..len, f32::NAN);
        if !sum(bad)?.is_nan() {
            return Err(format!("NaN in the last of {len} is lost"));
        }
    }
    // In one launch: full and partial chunks, no quads, nothing, narrow dtypes and views.
    let lens = [4, 70_000, 65_536, 131_076, 0, 37, 1024, 8];
    let many = lens.map(|len| Tensor::<1>::from_data(normal(len), &Device::flex()));
    let parts = |device: &Device, bad: Option<usize>| -> Vec<Tensor<1>> {
        let of = |(i, x): (usize, &Tensor<1>)| {
            let x = Tensor::<1>::from_data(x.clone().into_data(), device);
            let x = if i == 7 { x.cast(DType::BF16) } else { x };
            if bad == Some(i) {
                x.slice_fill(lens[i] - 1..lens[i], f32::NAN)
            } else {
                x
            }
        };
        let all: Vec<_> = many.iter().enumerate().map(of).collect();
        let views = [
            all[1].clone().narrow(0, 8, 4096),
            all[1].clone().narrow(0, 3, 4096),
        ];
        all.into_iter().chain(views).collect()
    };
    let square = |x: Tensor<1>| -> Result<f64, String> {
        Ok(host(x)?.into_iter().map(|x| f64::from(x).powi(2)).sum())
    };
    let expected: f64 = parts(&Device::flex(), None)
        .into_iter()
        .map(square)
        .sum::<Result<_, _>>()?;
    let found = sum_of(parts(&gpu, None))?;
    let apart = (found - expected).abs() / expected;
    if apart.is_nan() || apart > 1e-6 {
        return Err(format!("squares of many: {found}, not {expected}"));
    }
    for i in (0..lens.len()).filter(|i| lens[*i] > 0) {
        if !sum_of(parts(&gpu, Some(i)))?.is_nan() {
            return Err(format!("NaN in the last of number {i} is lost"));
        }
    }
    Ok(())
}

/// Gradients are ranges of one buffer, as a reduction leaves them, and parameters are adjacent in
/// memory: each update uses only its own numbers.
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
        // Adam's first step is the sign of the gradient.
        let expected: Vec<f32> = values[i * 64..i * 64 + LEN]
            .iter()
            .map(|grad| 1.0 - 1e-2 * grad.signum())
            .collect();
        close(&format!("parameter {i}"), &host(param)?, &expected, 1e-5)?;
    }
    Ok(())
}
