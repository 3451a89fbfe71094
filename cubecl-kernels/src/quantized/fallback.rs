//! Quantised products on the CPU, with the numbers that GPUs compute with.

use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{FloatDType, Tensor, TensorData};
use megaburn_autograd::IntoPrimitive;
use megaburn_autograd::backend_ops::cast;
use megaburn_autograd::on_composed_backends;

use super::operands::{ProductOf, Quantization, Quantized, QuantizedOps};
use super::recipe::{Scaling, SummedDim};
use super::scale::{Scale, largest_magnitude};
use super::sequence_shards::ShardCollectives;
use crate::gemm_ops::{GemmAlgorithm, swapped, without_elements};
use crate::gradient_accumulation_fusion::plus;

on_composed_backends! {
    impl QuantizedOps {
        /// The numbers that the elements stand for, in f32.
        type Operand = FloatTensor<Self>;

        fn largest_magnitude(x: FloatTensor<Self>) -> FloatTensor<Self> {
            let device = Self::wrap::<2>(x.clone()).device();
            let amax = largest_magnitude(elements::<Self>(x));
            Self::unwrap(Tensor::<1>::from_floats([amax], &device))
        }

        fn quantize_matrix(
            x: FloatTensor<Self>,
            amax: Option<FloatTensor<Self>>,
            how: Quantization,
        ) -> Quantized<FloatTensor<Self>> {
            let amaxes = amax.map(elements::<Self>);
            let along = |summed| {
                let amax = amaxes.as_ref().map(|all| all[how.amax_index(summed)]);
                quantized::<Self>(how.source::<Self>(x.clone(), summed), amax, &how, summed)
            };
            Quantized {
                rows: how.rows.then(|| swapped::<Self>(along(SummedDim::Rows))),
                cols: how.cols.then(|| along(SummedDim::Cols)),
            }
        }

        fn numbers_of(operand: FloatTensor<Self>) -> FloatTensor<Self> {
            operand
        }

        fn gathered(own: FloatTensor<Self>, over: &dyn ShardCollectives) -> FloatTensor<Self> {
            Self::unwrap(over.gather(Self::wrap(own)))
        }

        fn transposed(operand: FloatTensor<Self>) -> FloatTensor<Self> {
            swapped::<Self>(operand)
        }

        fn quantized_product(
            a: FloatTensor<Self>,
            b: FloatTensor<Self>,
            dtype: FloatDType,
            _: ProductOf,
            _: GemmAlgorithm,
        ) -> FloatTensor<Self> {
            let b = swapped::<Self>(b);
            let of_no_rows = without_elements::<Self>(&a, &b, dtype);
            of_no_rows.unwrap_or_else(|| cast::<Self>(Self::float_matmul(a, b), dtype))
        }

        fn add_quantized_product(
            a: FloatTensor<Self>,
            b: FloatTensor<Self>,
            sum: Option<Tensor<2>>,
            _: Option<Tensor<2>>,
            algorithm: GemmAlgorithm,
        ) -> Tensor<2> {
            let of = ProductOf::WeightGradient;
            let product = Self::quantized_product(a, b, FloatDType::F32, of, algorithm);
            plus(sum, Self::wrap(product))
        }
    }
}

/// All elements, in f32.
fn elements<B: IntoPrimitive>(x: FloatTensor<B>) -> Vec<f32> {
    let x = cast::<B>(x, FloatDType::F32);
    let rank_one = B::float_reshape(x.clone(), [x.shape().num_elements()].into());
    let data = B::wrap::<1>(rank_one).into_data();
    data.try_into_vec().expect("the elements are f32")
}

/// The numbers that the elements of `x` stand for after they were quantised.
fn quantized<B: IntoPrimitive>(
    x: FloatTensor<B>,
    amax: Option<f32>,
    how: &Quantization,
    summed: SummedDim,
) -> FloatTensor<B> {
    let [rows, cols] = [x.shape()[0], x.shape()[1]];
    let device = B::wrap::<2>(x.clone()).device();
    let mut all = elements::<B>(x);
    let Quantization { recipe, role, .. } = *how;
    let format = recipe.format(role);
    let [tall, wide] = recipe.block(role, summed);
    let [tall, wide] = [tall.min(rows), wide.min(cols)];
    let drawn = how.drawn([rows, cols], summed).map(|drawn| drawn.uniform());
    for first in (0..rows).step_by(tall.max(1)) {
        for left in (0..cols).step_by(wide.max(1)) {
            let last = (first + tall).min(rows);
            let right = (left + wide).min(cols);
            let of_block = || {
                let rows = (first..last).map(|row| &all[row * cols + left..row * cols + right]);
                largest_magnitude(rows.flatten().copied())
            };
            let scale = match (recipe.scaling, amax) {
                (Scaling::Nvfp4(_), Some(amax)) => Scale::nvfp4(amax, of_block()),
                (_, amax) => Scale::new(&recipe, format, amax.unwrap_or_else(of_block)),
            };
            for row in first..last {
                for at in row * cols + left..row * cols + right {
                    all[at] = match &drawn {
                        Some(drawn) => scale.quantized_stochastically(format, all[at], drawn[at]),
                        None => scale.quantized(format, all[at]),
                    };
                }
            }
        }
    }
    B::unwrap(Tensor::<2>::from_data(
        TensorData::new(all, [rows, cols]),
        &device,
    ))
}
