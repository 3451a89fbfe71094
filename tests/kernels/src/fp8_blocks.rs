//! Tests of FP8 matrices with scales of 128 neighbours or of blocks: the casts to the bit, and the
//! products compared with those of the decoded numbers in f64.

use burn::prelude::Device;
use burn::tensor::{DType, Tensor, TensorData};
use megaburn_cuda::gemm::{
    Fp8IntoOptions, Fp8Kind, Fp8Matrix, Fp8ProductOptions, fp8_product, fp8_product_into,
    takes_fp8_blocks,
};
use megaburn_kernels::fp8::{BlockCast, BlockCastOptions, block_cast};
use megaburn_kernels::{
    MatrixRole, QuantizationRecipe, Scaling, SmallFloat, SummedDim, is_emulated, quantized_numbers,
};

use super::compare::*;
use super::fp8::{KINDS, cube, largest, wrap};
use super::fp8_products::{Known, MIXES, TOLERANCE, tolerance};
use super::part;

pub(super) const TESTS: &[super::Test] = &[
    ("casts_are_those_of_the_cpu", casts),
    (
        "matrices_that_are_not_finite_have_scales_of_nan",
        not_finite,
    ),
    ("products", products),
    ("weight_gradients_are_added_in_f32", weight_gradients),
    ("devices_that_multiply_blocks_are_known", devices),
];

const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

fn options(kind: Fp8Kind, square: bool, power_of_two: bool) -> BlockCastOptions {
    BlockCastOptions {
        kind,
        largest: largest(kind),
        power_of_two,
        square,
        straight: true,
        transposed: true,
    }
}

fn cast_of(data: &TensorData, dtype: DType, options: BlockCastOptions) -> BlockCast {
    let x = Tensor::<2>::from_data(data.clone(), (&Device::cuda(0), dtype));
    block_cast(cube(x), options)
}

/// The numbers of a matrix and of its transpose are those that the CPU computes with. The padding is 0.
fn casts() -> Result<(), String> {
    for (kind, format) in KINDS.into_iter().zip([SmallFloat::E4m3, SmallFloat::E5m2]) {
        for (square, shape) in [
            (false, [1, 128]),
            (false, [37, 384]),
            (false, [300, 256]),
            (true, [128, 128]),
            (true, [256, 640]),
        ] {
            for power_of_two in [false, true] {
                if !part::is_mine() {
                    continue;
                }
                for dtype in FLOATS {
                    let what = format!("{kind:?} {square} {shape:?} {power_of_two} {dtype:?}");
                    let data = normal(shape, dtype);
                    let found = cast_of(&data, dtype, options(kind, square, power_of_two));
                    let recipe = QuantizationRecipe {
                        scaling: Scaling::Blocks,
                        forward: format,
                        gradients: format,
                        power_of_two_scales: power_of_two,
                    };
                    let role = match square {
                        true => MatrixRole::Weight,
                        false => MatrixRole::Input,
                    };
                    for (summed, matrix) in [
                        (SummedDim::Cols, found.straight),
                        (SummedDim::Rows, found.transposed),
                    ] {
                        let known = Known::of(matrix.ok_or("no result")?)?;
                        let x = Tensor::from_data(data.clone(), (&Device::flex(), dtype));
                        let mut expected = quantized_numbers(x, recipe, role, summed);
                        if summed == SummedDim::Rows {
                            expected = expected.transpose();
                        }
                        same(&format!("{what} {summed:?}"), &known, expected)?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// Compares the numbers of a matrix, which may be padded with zeros.
fn same(what: &str, found: &Known, expected: Tensor<2>) -> Result<(), String> {
    let [rows, cols] = expected.dims();
    let padded = found.matrix.values.meta.shape()[1];
    let expected = host(expected)?;
    for (i, number) in found.numbers.iter().enumerate() {
        let [row, col] = [i / padded, i % padded];
        let expected = match row < rows && col < cols {
            true => expected[row * cols + col],
            false => 0.0,
        };
        if (*number as f32).to_bits() != expected.to_bits() {
            return Err(format!(
                "{what}: {number} instead of {expected} at {row}, {col}"
            ));
        }
    }
    Ok(())
}

fn not_finite() -> Result<(), String> {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for square in [false, true] {
            let mut numbers = vec![1.0f32; 256 * 256];
            numbers[130 * 256 + 5] = bad;
            let data = TensorData::new(numbers, [256, 256]);
            let found = cast_of(&data, DType::F32, options(Fp8Kind::E4m3, square, true));
            for matrix in [found.straight, found.transposed] {
                let matrix: Fp8Matrix = matrix.ok_or("no result")?;
                let scales = wrap::<2>(matrix.scale_inv);
                // Those of blocks are padded.
                let scales = match square {
                    true => scales.narrow(1, 0, 2),
                    false => scales,
                };
                let scales = host(scales)?;
                let found = scales.iter().filter(|scale| scale.is_nan()).count();
                if found != 1 {
                    return Err(format!("{bad} {square}: {found} scales are NaN"));
                }
            }
        }
    }
    Ok(())
}

/// A matrix `[rows, k]` with scales of neighbours, or of blocks.
fn operand(shape: [usize; 2], kind: Fp8Kind, square: bool) -> Result<Known, String> {
    let cast = cast_of(
        &normal(shape, DType::F32),
        DType::F32,
        options(kind, square, false),
    );
    Known::of(cast.straight.ok_or("no result")?)
}

fn products() -> Result<(), String> {
    if !takes_fp8_blocks(&Device::cuda(0)) {
        return Ok(());
    }
    for kinds in MIXES {
        for squares in [[false, true], [true, false], [false, false]] {
            for [m, n, k] in [[128, 128, 128], [256, 384, 640], [16, 256, 128]] {
                if !part::is_mine() || (squares[0] && m % 128 > 0) {
                    continue;
                }
                for dtype in [DType::BF16, DType::F16, DType::F32] {
                    let a = operand([m, k], kinds[0], squares[0])?;
                    let b = operand([n, k], kinds[1], squares[1])?;
                    let what = format!("{m}x{k} {kinds:?} {squares:?} {n}x{k} into {dtype:?}");
                    let how = Fp8ProductOptions {
                        dtype,
                        tune: true,
                        fast_accum: true,
                        sums_tokens: false,
                    };
                    let found = fp8_product(a.matrix.clone(), b.matrix.clone(), how);
                    let found = host(wrap::<2>(found.map_err(|error| error.to_string())?))?;
                    close(&what, &found, &a.times(&b, &[]), tolerance(dtype))?;
                }
            }
        }
    }
    Ok(())
}

/// Three micro-batches: the first replaces what is in the buffer.
fn weight_gradients() -> Result<(), String> {
    if !takes_fp8_blocks(&Device::cuda(0)) {
        return Ok(());
    }
    for kinds in MIXES {
        for [m, n, k] in [[128, 256, 384], [256, 128, 128]] {
            let sum = cube(Tensor::<2>::full([m, n], f32::NAN, &Device::cuda(0)));
            let mut expected: Vec<f32> = Vec::new();
            for add in [false, true, true] {
                let a = operand([m, k], kinds[0], false)?;
                let b = operand([n, k], kinds[1], false)?;
                expected = a.times(&b, &expected);
                let options = Fp8IntoOptions {
                    add,
                    tune: true,
                    fast_accum: false,
                    sums_tokens: true,
                };
                fp8_product_into(a.matrix, b.matrix, &sum, options)
                    .map_err(|error| error.to_string())?;
            }
            let what = format!("{m}x{n} over {k} of {kinds:?}");
            close(&what, &host(wrap::<2>(sum))?, &expected, TOLERANCE)?;
        }
    }
    Ok(())
}

/// What the console says about a recipe is what the device does.
fn devices() -> Result<(), String> {
    let gpu = Device::cuda(0);
    let of = |scaling| QuantizationRecipe {
        scaling,
        forward: SmallFloat::E4m3,
        gradients: SmallFloat::E4m3,
        power_of_two_scales: true,
    };
    let found = [Scaling::Tensor, Scaling::Blocks, Scaling::Microscaling]
        .map(|scaling| is_emulated(&of(scaling), &gpu));
    match found == [false, !takes_fp8_blocks(&gpu), true] && !takes_fp8_blocks(&Device::flex()) {
        true => Ok(()),
        false => Err(format!("emulated: {found:?}")),
    }
}
