//! Tests of products of FP8 matrices, compared with products of the decoded numbers in f64.

use burn::{
    backend::Cube,
    prelude::{Device, Int},
    tensor::{DType, Tensor, TensorData},
};
use burn_cubecl::tensor::CubeTensor;
use megaburn_cuda::gemm::{
    Fp8IntoOptions, Fp8Kind, Fp8Matrix, Fp8ProductOptions, Fp8Scaling, GemmOptions, fp8_product,
    fp8_product_into, set_options, takes_fp8,
};
use megaburn_kernels::fp8::{amax, cast};

use super::{compare::*, fp8::*, part};

pub(super) const TESTS: &[super::Test] = &[
    ("products_of_fp8_matrices", products),
    ("weight_gradients_are_added_in_f32", weight_gradients),
    ("the_three_products_of_a_layer", layer),
    ("matrices_that_cannot_be_multiplied_are_refused", refusals),
    ("devices_without_fp8_are_known", devices),
];

/// Each product of two matrices has an error of at most this fraction of the largest element. Tensor
/// cores add up with fewer bits than f32.
pub(super) const TOLERANCE: f64 = 2e-3;

/// The tolerance of results in `dtype`.
pub(super) fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => TOLERANCE + 4e-3,
        _ => TOLERANCE + 5e-4,
    }
}

/// A matrix on the GPU, and its numbers.
pub(super) struct Known {
    pub(super) matrix: Fp8Matrix,
    pub(super) numbers: Vec<f64>,
    rows: usize,
    cols: usize,
}

impl Known {
    pub(super) fn of(matrix: Fp8Matrix) -> Result<Self, String> {
        let shape = matrix.values.meta.shape();
        let [rows, cols] = [shape[0], shape[1]];
        let scales = matrix.scale_inv.meta.shape().to_vec();
        let factors = match scales.len() {
            1 => host(wrap::<1>(matrix.scale_inv.clone()))?,
            _ => host(wrap::<2>(matrix.scale_inv.clone()))?,
        };
        let factor = |row: usize, col: usize| match matrix.scaling {
            Fp8Scaling::Matrix => factors[0],
            Fp8Scaling::Neighbors => factors[col / 128 * scales[1] + row],
            Fp8Scaling::Blocks => factors[row / 128 * scales[1] + col / 128],
        };
        let all = bytes(matrix.values.clone())?;
        let numbers = all.into_iter().enumerate().map(|(i, byte)| {
            let number = number(byte, matrix.kind).expect("every number is finite");
            number * f64::from(factor(i / cols, i % cols))
        });
        let numbers = numbers.collect();
        Ok(Self {
            matrix,
            numbers,
            rows,
            cols,
        })
    }

    /// Normal numbers in FP8.
    fn normal(shape: [usize; 2], kind: Fp8Kind) -> Result<Self, String> {
        let [straight, _] = in_fp8(&normal(shape, DType::F32), DType::F32, kind);
        Self::of(straight)
    }

    /// `self otherᵀ + sum`.
    pub(super) fn times(&self, other: &Self, sum: &[f32]) -> Vec<f32> {
        let mut out = sum.to_vec();
        out.resize(self.rows * other.rows, 0.0);
        for (i, out) in out.iter_mut().enumerate() {
            let [row, col] = [i / other.rows, i % other.rows];
            let a = &self.numbers[row * self.cols..][..self.cols];
            let b = &other.numbers[col * other.cols..][..other.cols];
            let product: f64 = a.iter().zip(b).map(|(a, b)| a * b).sum();
            *out = (f64::from(*out) + product) as f32;
        }
        out
    }
}

/// The matrix and its transpose in FP8.
fn in_fp8(data: &TensorData, dtype: DType, kind: Fp8Kind) -> [Fp8Matrix; 2] {
    let x = cube(Tensor::<2>::from_data(
        data.clone(),
        (&Device::cuda(0), dtype),
    ));
    let found = cast(x.clone(), amax(x), options(kind));
    let scale_inv = found.scale_inv;
    [found.straight, found.transposed].map(|values| {
        let values = values.expect("it was asked for");
        Fp8Matrix::with_one_scale(values, scale_inv.clone(), kind)
    })
}

fn how(dtype: DType, fast_accum: bool) -> Fp8ProductOptions {
    Fp8ProductOptions {
        dtype,
        tune: true,
        fast_accum,
        sums_tokens: false,
    }
}

pub(super) const MIXES: [[Fp8Kind; 2]; 3] = [
    [Fp8Kind::E4m3, Fp8Kind::E4m3],
    [Fp8Kind::E5m2, Fp8Kind::E4m3],
    [Fp8Kind::E4m3, Fp8Kind::E5m2],
];

fn products() -> Result<(), String> {
    let device = Device::cuda(0);
    for tune in [false, true] {
        set_options(
            &device,
            GemmOptions {
                tune,
                ..GemmOptions::default()
            },
        );
        for kinds in MIXES {
            for [m, n, k] in [[64, 48, 32], [37, 32, 272], [1, 16, 16]] {
                for dtype in [DType::BF16, DType::F16, DType::F32] {
                    for fast_accum in [false, true] {
                        if !part::is_mine() {
                            continue;
                        }
                        let a = Known::normal([m, k], kinds[0])?;
                        let b = Known::normal([n, k], kinds[1])?;
                        let what = format!("{m}x{k} {kinds:?} {n}x{k} into {dtype:?}");
                        let found =
                            fp8_product(a.matrix.clone(), b.matrix.clone(), how(dtype, fast_accum));
                        let found = found.map_err(|error| error.to_string())?;
                        if found.dtype != dtype || found.meta.shape().as_slice() != [m, n] {
                            return Err(format!("{what}: {:?}", found.meta.shape()));
                        }
                        let found = host(wrap::<2>(found))?;
                        close(&what, &found, &a.times(&b, &[]), tolerance(dtype))?;
                    }
                }
            }
        }
    }
    set_options(&device, GemmOptions::default());
    Ok(())
}

/// Three micro-batches: the first replaces what is in the buffer.
fn weight_gradients() -> Result<(), String> {
    for kinds in MIXES {
        for [m, n, k] in [[64, 48, 64], [17, 32, 48]] {
            let sum = cube(Tensor::<2>::full([m, n], f32::NAN, &Device::cuda(0)));
            let mut expected: Vec<f32> = Vec::new();
            for add in [false, true, true] {
                let a = Known::normal([m, k], kinds[0])?;
                let b = Known::normal([n, k], kinds[1])?;
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

/// The matrices of a layer are cast once each: fprop and dgrad take them as they are, wgrad their
/// transposes, in which tokens are padded.
fn layer() -> Result<(), String> {
    for [t, inputs, outputs] in [[37, 48, 32], [128, 32, 144], [0, 32, 16]] {
        let dtype = DType::BF16;
        let data = |shape| normal(shape, dtype);
        let [x, xt] = in_fp8(&data([t, inputs]), dtype, Fp8Kind::E4m3);
        let [w, wt] = in_fp8(&data([outputs, inputs]), dtype, Fp8Kind::E4m3);
        let [dy, dyt] = in_fp8(&data([t, outputs]), dtype, Fp8Kind::E5m2);
        let what = |name: &str| format!("{name} of {t}x{inputs}->{outputs}");
        for (name, a, b) in [("fprop", x, w), ("dgrad", dy, wt)] {
            let found = fp8_product(a.clone(), b.clone(), how(dtype, name == "fprop"));
            let found = host(wrap::<2>(found.map_err(|error| error.to_string())?))?;
            let expected = Known::of(a)?.times(&Known::of(b)?, &[]);
            close(&what(name), &found, &expected, tolerance(dtype))?;
        }
        if t == 0 {
            continue;
        }
        let options = Fp8ProductOptions {
            sums_tokens: true,
            ..how(DType::F32, false)
        };
        let found = fp8_product(dyt.clone(), xt.clone(), options);
        let found = host(wrap::<2>(found.map_err(|error| error.to_string())?))?;
        let expected = Known::of(dyt)?.times(&Known::of(xt)?, &[]);
        close(&what("wgrad"), &found, &expected, TOLERANCE)?;
    }
    Ok(())
}

fn zeros(shape: [usize; 2], dtype: DType, kind: Fp8Kind) -> Fp8Matrix {
    let device = Device::cuda(0);
    let data = TensorData::zeros::<u8, _>(shape);
    let values = Tensor::<2, Int>::from_data(data, (&device, dtype));
    let values: CubeTensor = values
        .try_into_primitive::<Cube>()
        .expect("it is on the GPU");
    let scale_inv = cube(Tensor::<1>::ones([1], &device));
    Fp8Matrix::with_one_scale(values, scale_inv, kind)
}

fn refusals() -> Result<(), String> {
    let of = |shape, kind| zeros(shape, DType::U8, kind);
    let [e4m3, e5m2] = KINDS;
    let two_scales = Fp8Matrix {
        scale_inv: cube(Tensor::<1>::ones([2], &Device::cuda(0))),
        ..of([32, 48], e4m3)
    };
    let blocks = Fp8Matrix {
        scale_inv: cube(Tensor::<2>::ones([1, 4], &Device::cuda(0))),
        scaling: Fp8Scaling::Blocks,
        ..of([32, 48], e4m3)
    };
    let swapped = Fp8Matrix {
        values: megaburn_cuda::tensor::transposed(of([48, 32], e4m3).values),
        ..of([32, 48], e4m3)
    };
    let good = || of([32, 48], e4m3);
    for (a, b, dtype, why) in [
        (
            of([7, 48], e5m2),
            of([32, 48], e5m2),
            DType::F32,
            "e5m2 by e5m2",
        ),
        (
            of([7, 40], e5m2),
            of([32, 40], e4m3),
            DType::F32,
            "the 40 columns of both",
        ),
        (
            of([7, 48], e5m2),
            of([24, 48], e4m3),
            DType::F32,
            "the 24 rows of the second",
        ),
        (
            of([7, 48], e5m2),
            of([32, 64], e4m3),
            DType::F32,
            "do not match",
        ),
        (
            good(),
            zeros([32, 48], DType::U32, e4m3),
            DType::F32,
            "stored in u8, not u32",
        ),
        (
            good(),
            two_scales,
            DType::F32,
            "[1] contiguous f32, not [2]",
        ),
        (good(), blocks, DType::F32, "scales are Matrix and Blocks"),
        (good(), swapped, DType::F32, "must be contiguous"),
        (good(), good(), DType::F64, "cannot be f64"),
        (
            of([32, 0], e4m3),
            of([32, 0], e4m3),
            DType::F32,
            "at least one column",
        ),
    ] {
        match fp8_product(a, b, how(dtype, false)) {
            Ok(_) => return Err(format!("not refused: {why}")),
            Err(error) if error.to_string().contains(why) => {}
            Err(error) => return Err(format!("{error} instead of {why}")),
        }
    }
    Ok(())
}

fn devices() -> Result<(), String> {
    match [takes_fp8(&Device::flex()), takes_fp8(&Device::cuda(0))] {
        [false, true] => Ok(()),
        [of_cpu, of_gpu] => Err(format!("CPU: {of_cpu}, GPU: {of_gpu}")),
    }
}
