//! Tests of the cast to FP8 and of the largest magnitude, to the bit. The definition of the cast
//! here searches all numbers of the format for the nearest one.

use burn::{
    backend::Cube,
    prelude::{Device, Int},
    tensor::{DType, Distribution, Tensor, TensorData},
};
use burn_cubecl::tensor::CubeTensor;
use megaburn_cuda::{
    gemm::Fp8Kind,
    tensor::{from_backend, into_backend},
};
use megaburn_kernels::fp8::{CastOptions, amax, cast};

use super::{compare::host, part};

pub(super) const TESTS: &[super::Test] = &[
    ("casts_are_the_nearest_numbers", casts),
    ("ties_go_to_even_numbers_and_large_ones_saturate", ties),
    ("views_are_cast_as_their_copies", views),
    ("scales_of_extreme_magnitudes", scales),
    ("the_largest_magnitude", magnitudes),
    ("the_largest_magnitude_of_views", magnitudes_of_views),
];

pub(super) const KINDS: [Fp8Kind; 2] = [Fp8Kind::E4m3, Fp8Kind::E5m2];
const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// The number that a byte stands for; `None` for NaN and infinity.
pub(super) fn number(byte: u8, kind: Fp8Kind) -> Option<f64> {
    let (mantissa_bits, bias, last) = match kind {
        Fp8Kind::E4m3 => (3, 7, 0x7e),
        Fp8Kind::E5m2 => (2, 15, 0x7b),
    };
    let bits = i32::from(byte & 0x7f);
    let one = 1 << mantissa_bits;
    let (exponent, mantissa) = match bits / one {
        0 => (1, bits),
        exponent => (exponent, one + bits % one),
    };
    let sign = if byte > 0x7f { -1.0 } else { 1.0 };
    let size = f64::from(mantissa) * 2f64.powi(exponent - bias - mantissa_bits);
    (bits <= last).then_some(sign * size)
}

pub(super) fn largest(kind: Fp8Kind) -> f32 {
    match kind {
        Fp8Kind::E4m3 => 448.0,
        Fp8Kind::E5m2 => 57344.0,
    }
}

/// The byte of the nearest number; of two, the even one.
fn nearest(x: f32, kind: Fp8Kind) -> u8 {
    let size = f64::from(x.abs().min(largest(kind)));
    let mut best = (f64::INFINITY, 0);
    for byte in 0..0x7f_u8 {
        let Some(number) = number(byte, kind) else {
            continue;
        };
        let apart = (number - size).abs();
        if apart < best.0 || (apart == best.0 && byte % 2 == 0) {
            best = (apart, byte);
        }
    }
    best.1 | if x.is_sign_negative() { 0x80 } else { 0 }
}

/// The scale by its definition.
fn scale(amax: f32, kind: Fp8Kind, power_of_two: bool) -> f32 {
    if amax == 0.0 {
        return 1.0;
    }
    let scale = (largest(kind) / amax).min(2f32.powi(126));
    if power_of_two {
        f32::from_bits(scale.to_bits() & 0xff80_0000)
    } else {
        scale
    }
}

pub(super) fn cube<const D: usize>(x: Tensor<D>) -> CubeTensor {
    from_backend(x.try_into_primitive::<Cube>().expect("it is on the GPU"))
}

pub(super) fn wrap<const D: usize>(x: CubeTensor) -> Tensor<D> {
    Tensor::from_primitive::<Cube>(into_backend(x))
}

fn one(value: f32) -> CubeTensor {
    cube(Tensor::<1>::from_floats([value], &Device::cuda(0)))
}

pub(super) fn bytes(x: CubeTensor) -> Result<Vec<u8>, String> {
    let data = Tensor::<2, Int>::from_primitive::<Cube>(x).try_into_data();
    let data = data.map_err(|error| error.to_string())?;
    data.try_to_vec().map_err(|error| format!("{error:?}"))
}

pub(super) fn options(kind: Fp8Kind) -> CastOptions {
    CastOptions {
        kind,
        largest: largest(kind),
        power_of_two: false,
        straight: true,
        transposed: true,
    }
}

/// The numbers as those of `dtype`, in f32.
fn rounded<const D: usize>(data: TensorData, dtype: DType) -> Result<Vec<f32>, String> {
    host(Tensor::<D>::from_data(data, (&Device::cuda(0), dtype)))
}

/// Numbers of many magnitudes, some of them zeros of both signs.
fn magnitudes_from(shape: [usize; 2]) -> TensorData {
    let uniform = |low, high| -> Vec<f32> {
        let x = Tensor::<2>::random(shape, Distribution::Uniform(low, high), &Device::flex());
        x.into_data().try_to_vec().expect("they are f32")
    };
    let [exponents, mantissas, kinds] =
        [(-24.0, 4.0), (-1.0, 1.0), (0.0, 16.0)].map(|(low, high)| uniform(low, high));
    let numbers = exponents.iter().zip(&mantissas).zip(&kinds);
    let numbers = numbers.map(|((exponent, mantissa), kind)| match *kind as u32 {
        0 => 0.0,
        1 => -0.0,
        _ => mantissa * exponent.exp2(),
    });
    TensorData::new(numbers.collect::<Vec<f32>>(), shape)
}

/// Checks all results of a cast of `x` against the definition.
fn check(
    what: &str,
    x: Tensor<2>,
    numbers: &[f32],
    amax: f32,
    options: CastOptions,
) -> Result<(), String> {
    let [rows, cols] = x.dims();
    let kind = options.kind;
    let scale = scale(amax, kind, options.power_of_two);
    let found = cast(cube(x), one(amax), options);
    let inverse = host(wrap::<1>(found.scale_inv))?[0];
    if inverse.to_bits() != (1.0 / scale).to_bits() {
        return Err(format!("{what}: 1 / {scale} is {inverse}"));
    }
    let byte = |row: usize, col: usize| nearest(numbers[row * cols + col] * scale, kind);
    if found.straight.is_some() != options.straight
        || found.transposed.is_some() != options.transposed
    {
        return Err(format!("{what}: not the results that were asked for"));
    }
    if let Some(straight) = found.straight {
        for (i, found) in bytes(straight)?.into_iter().enumerate() {
            let [row, col] = [i / cols, i % cols];
            if found != byte(row, col) {
                let x = numbers[i] * scale;
                return Err(format!("{what}: {x:e} at {row}, {col} is {found:#x}"));
            }
        }
    }
    if let Some(transposed) = found.transposed {
        let padded = rows.next_multiple_of(16);
        if transposed.meta.shape().as_slice() != [cols, padded] {
            return Err(format!("{what}: {:?}", transposed.meta.shape()));
        }
        for (i, found) in bytes(transposed)?.into_iter().enumerate() {
            let [col, row] = [i / padded, i % padded];
            let expected = if row < rows { byte(row, col) } else { 0 };
            if found != expected {
                return Err(format!(
                    "{what}: {found:#x} at {col}, {row} of the transpose"
                ));
            }
        }
    }
    Ok(())
}

fn casts() -> Result<(), String> {
    for dtype in FLOATS {
        for kind in KINDS {
            for (i, shape) in [[1, 1], [17, 33], [130, 272], [48, 64], [300, 20]]
                .into_iter()
                .enumerate()
            {
                if !part::is_mine() {
                    continue;
                }
                let numbers = rounded::<2>(magnitudes_from(shape), dtype)?;
                let amax = numbers.iter().fold(0f32, |amax, x| amax.max(x.abs()));
                let data = TensorData::new(numbers.clone(), shape);
                let x = Tensor::from_data(data, (&Device::cuda(0), dtype));
                let options = CastOptions {
                    power_of_two: i % 2 == 1,
                    straight: i != 3,
                    transposed: i != 2,
                    ..options(kind)
                };
                let what = format!("{shape:?} {dtype:?} to {kind:?}");
                check(&what, x, &numbers, amax, options)?;
            }
        }
    }
    Ok(())
}

/// All numbers of a format, those in the middle of two, and their neighbours; and numbers that
/// exceed the largest.
fn ties() -> Result<(), String> {
    for kind in KINDS {
        let all: Vec<f64> = (0..=0x7f).filter_map(|byte| number(byte, kind)).collect();
        let middles = all
            .windows(2)
            .map(|pair| ((pair[0] + pair[1]) / 2.0) as f32);
        let mut numbers: Vec<f32> = all.iter().map(|x| *x as f32).collect();
        for middle in middles {
            numbers.extend([middle, middle.next_down(), middle.next_up()]);
        }
        let above = largest(kind);
        numbers.extend([above * 1.03, above * 1.1, above * 8.0, 1e30, f32::MAX]);
        numbers.extend([1e-30, f32::from_bits(1), f32::MIN_POSITIVE]);
        numbers.extend(numbers.clone().iter().map(|x| -x));
        let shape = [numbers.len() / 2, 2];
        for dtype in [DType::F32, DType::BF16] {
            let data = TensorData::new(numbers.clone(), shape);
            let numbers = rounded::<2>(data.clone(), dtype)?;
            let x = Tensor::from_data(data, (&Device::cuda(0), dtype));
            let what = format!("ties of {kind:?} in {dtype:?}");
            check(&what, x, &numbers, above, options(kind))?;
        }
    }
    Ok(())
}

/// Transposed matrices and slices are read where they are, or copied.
fn views() -> Result<(), String> {
    let device = Device::cuda(0);
    for dtype in [DType::BF16, DType::F32] {
        for [rows, cols] in [[40, 1024], [33, 7]] {
            let data = magnitudes_from([rows, cols]);
            let x = || Tensor::<2>::from_data(data.clone(), (&device, dtype));
            let views = [
                x().swap_dims(0, 1),
                x().narrow(0, 3, rows - 5),
                x().narrow(1, cols / 2, cols / 2),
                x().narrow(1, 1, cols - 2),
            ];
            for (i, view) in views.into_iter().enumerate() {
                let numbers = host(view.clone())?;
                let what = format!("view {i} of {rows}x{cols} {dtype:?}");
                check(&what, view, &numbers, 16.0, options(Fp8Kind::E4m3))?;
            }
        }
    }
    Ok(())
}

fn scales() -> Result<(), String> {
    let device = Device::cuda(0);
    for kind in KINDS {
        for power_of_two in [false, true] {
            let options = CastOptions {
                power_of_two,
                ..options(kind)
            };
            for amax in [0.0, 1e-40, 1e-37, 3e-5, 1.0, 447.9, 1e30, f32::MAX] {
                let numbers = [amax, -amax / 3.0, 0.0, amax / 7.0];
                let x = Tensor::<2>::from_data([numbers], &device);
                let what = format!("amax {amax:e} {kind:?}, power of two: {power_of_two}");
                check(&what, x, &numbers, amax, options)?;
            }
            for amax in [f32::INFINITY, f32::NAN] {
                let x = Tensor::<2>::from_data([[amax, 1.0]], &device);
                let found = cast(cube(x), one(amax), options);
                let inverse = host(wrap::<1>(found.scale_inv))?[0];
                if !inverse.is_nan() {
                    return Err(format!(
                        "amax {amax}: the inverse of the scale is {inverse}"
                    ));
                }
            }
            for shape in [[0, 8], [8, 0]] {
                let x = Tensor::<2>::empty(shape, &device);
                let found = cast(cube(x), one(2.0), options);
                let inverse = host(wrap::<1>(found.scale_inv))?[0];
                if inverse.to_bits() != (1.0 / scale(2.0, kind, power_of_two)).to_bits() {
                    return Err(format!("{shape:?}: the inverse of the scale is {inverse}"));
                }
            }
        }
    }
    Ok(())
}

/// The bits of the largest magnitude.
fn found<const D: usize>(x: Tensor<D>) -> Result<u32, String> {
    let found = amax(cube(x));
    if found.dtype != DType::F32 || found.meta.shape().as_slice() != [1] {
        return Err(format!("{:?} {:?}", found.dtype, found.meta.shape()));
    }
    Ok(host(wrap::<1>(found))?[0].to_bits())
}

fn magnitudes() -> Result<(), String> {
    let device = Device::cuda(0);
    for dtype in FLOATS {
        for shape in [[1, 1], [17, 33], [300, 4111], [64, 128]] {
            let numbers = rounded::<2>(magnitudes_from(shape), dtype)?;
            let tensor = |numbers: &[f32]| {
                let data = TensorData::new(numbers.to_vec(), shape);
                Tensor::<2>::from_data(data, (&device, dtype))
            };
            let what = format!("{shape:?} {dtype:?}");
            let expected = numbers.iter().fold(0f32, |amax, x| amax.max(x.abs()));
            let bits = found(tensor(&numbers))?;
            if bits != expected.to_bits() {
                return Err(format!(
                    "{what}: {} is not {expected}",
                    f32::from_bits(bits)
                ));
            }
            let place = |value: f32, of: usize| {
                let mut numbers = numbers.clone();
                let at = numbers.len() * of / 3;
                numbers[at] = value;
                numbers
            };
            let infinite = found(tensor(&place(f32::NEG_INFINITY, 1)))?;
            let mut both = place(f32::INFINITY, 2);
            both[0] = f32::NAN;
            let nan = found(tensor(&both))?;
            if f32::from_bits(infinite) != f32::INFINITY || !f32::from_bits(nan).is_nan() {
                return Err(format!(
                    "{what}: {infinite:#x} of infinity, {nan:#x} of NaN"
                ));
            }
        }
        // The largest of few numbers in each place, of a vector or alone.
        for shape in [[2, 16], [1, 7]] {
            for at in 0..shape[0] * shape[1] {
                let mut numbers = vec![0.5; shape[0] * shape[1]];
                numbers[at] = -0.75;
                let data = TensorData::new(numbers, shape);
                let bits = found(Tensor::<2>::from_data(data, (&device, dtype)))?;
                if f32::from_bits(bits) != 0.75 {
                    return Err(format!("{shape:?} {dtype:?}: not found in place {at}"));
                }
            }
        }
        for shape in [[0, 3], [3, 0], [5, 3]] {
            let x = Tensor::<2>::zeros(shape, (&device, dtype));
            match found(-x)? {
                0 => {}
                bits => return Err(format!("{shape:?} {dtype:?}: {bits:#x}")),
            }
        }
    }
    Ok(())
}

fn magnitudes_of_views() -> Result<(), String> {
    let x = Tensor::<3>::random([6, 40, 1024], Distribution::Default, &Device::flex());
    for dtype in [DType::BF16, DType::F32] {
        let x = Tensor::<3>::from_data(x.to_data(), (&Device::cuda(0), dtype));
        let views = [
            x.clone().swap_dims(0, 2),
            x.clone().swap_dims(1, 2).swap_dims(0, 1),
            x.clone().narrow(2, 512, 256),
            x.clone().narrow(2, 512, 256).swap_dims(1, 2),
            x.clone().narrow(1, 3, 9).swap_dims(0, 1),
            x.narrow(2, 1, 1).expand([6, 40, 5]),
        ];
        for (i, view) in views.into_iter().enumerate() {
            let expected = host(view.clone())?.into_iter().fold(0f32, f32::max);
            let bits = found(view)?;
            if bits != expected.to_bits() {
                let found = f32::from_bits(bits);
                return Err(format!("view {i} {dtype:?}: {found} is not {expected}"));
            }
        }
    }
    Ok(())
}
