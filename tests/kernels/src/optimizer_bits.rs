//! Compares masters that are stored as remainders, and moments that are stored in 8 bits, with those
//! of the CPU, to the bit.

use burn::{
    prelude::Device,
    tensor::{DType, Tensor, TensorData, bf16},
};
use megaburn_kernels::{
    Fp8Moment, joined_master, master_remainder, packed_moment, unpacked_moment,
};

use super::compare::normal;

pub(super) const TESTS: &[super::Test] = &[
    ("remainders_are_those_of_the_cpu", remainders),
    ("moments_in_8_bits_are_those_of_the_cpu", moments),
];

const LENS: [usize; 4] = [1, 37, 4096, 100_003];

/// Numbers over many orders of magnitude, some of them zero, not finite, or exactly between two bf16
/// numbers.
fn wide(len: usize) -> Vec<f32> {
    let [size, order] = [0; 2].map(|_| normal([len], DType::F32).try_to_vec::<f32>());
    let pairs = size.into_iter().flatten().zip(order.into_iter().flatten());
    let of = |(i, (size, order)): (usize, (f32, f32))| match i % 512 {
        20 => 0.0,
        21 => f32::from_bits(0x3f80_8000),
        22 => f32::from_bits(0xbf81_8000),
        400 if i > 4096 => f32::NAN,
        401 if i > 8192 => f32::INFINITY,
        _ => size * (4.0 * order).exp(),
    };
    pairs.enumerate().map(of).collect()
}

fn on(values: &[f32], device: &Device) -> Tensor<1> {
    Tensor::from_data(TensorData::from(values), (device, DType::F32))
}

/// The bits of a tensor of 16-bit elements.
fn words(x: Tensor<1>) -> Result<Vec<u16>, String> {
    let data = x.try_into_data().map_err(|error| error.to_string())?;
    let words: Vec<bf16> = data.try_to_vec().map_err(|error| format!("{error:?}"))?;
    Ok(words.into_iter().map(bf16::to_bits).collect())
}

/// The bits of f32 numbers; those of NaN, which differ, become the same.
fn bits(x: Tensor<1>) -> Result<Vec<u32>, String> {
    let data = x.try_into_data().map_err(|error| error.to_string())?;
    let values: Vec<f32> = data.try_to_vec().map_err(|error| format!("{error:?}"))?;
    let bits = |x: f32| if x.is_nan() { u32::MAX } else { x.to_bits() };
    Ok(values.into_iter().map(bits).collect())
}

fn equal<T: PartialEq + std::fmt::Debug>(what: &str, on: [&[T]; 2]) -> Result<(), String> {
    let [found, expected] = on;
    let differs = found.iter().zip(expected).position(|(a, b)| a != b);
    match differs {
        None if found.len() == expected.len() => Ok(()),
        None => Err(format!(
            "{what}: {} elements, not {}",
            found.len(),
            expected.len()
        )),
        Some(i) => Err(format!(
            "{what}: element {i} of {} is {:x?}, not {:x?}",
            found.len(),
            found[i],
            expected[i]
        )),
    }
}

fn remainders() -> Result<(), String> {
    for len in LENS {
        let values = wide(len);
        let run = |device: &Device| {
            let master = on(&values, device);
            let param = master.clone().cast(DType::BF16);
            let remainder = master_remainder(master, param.clone());
            bits(joined_master(param, remainder))
        };
        let [found, expected] = [Device::cuda(0), Device::flex()].map(|device| run(&device));
        equal(&format!("the masters of {len}"), [&found?, &expected?])?;
    }
    Ok(())
}

fn moments() -> Result<(), String> {
    for (len, code) in LENS
        .into_iter()
        .flat_map(|len| [(len, Fp8Moment::Plain), (len, Fp8Moment::Root)])
    {
        let mut values = wide(len);
        if code == Fp8Moment::Root {
            values.iter_mut().for_each(|x| *x = x.abs());
        }
        let run = |device: &Device| {
            let packed = packed_moment(on(&values, device), code, 12_345, 256);
            (
                words(packed.clone()),
                bits(unpacked_moment(packed, len, code)),
            )
        };
        let [found, expected] = [Device::cuda(0), Device::flex()].map(|device| run(&device));
        let what = format!("of {len} as {code:?}");
        equal(&format!("the words {what}"), [&found.0?, &expected.0?])?;
        equal(&format!("the numbers {what}"), [&found.1?, &expected.1?])?;
    }
    Ok(())
}
