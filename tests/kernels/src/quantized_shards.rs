//! Tests of shards of tokens that are gathered in FP8: their bytes make the whole matrix and its
//! transpose.

use std::sync::Arc;

use burn::prelude::Device;
use burn::tensor::{DType, Int, Tensor, TensorData};
use megaburn_kernels::{
    LinearOptions, LinearQuantization, MatrixRole, QuantizationRecipe, Scaling, SequenceShards,
    ShardCollectives, SmallFloat, quantized_linear,
};

use super::compare::{host, normal};
use super::part;

pub(super) const TESTS: &[super::Test] = &[("gathered_shards_are_the_whole_matrix", gathered)];

/// Ranks with the same shards as this one, which is the first of them.
#[derive(Debug)]
struct Copies(usize);

impl ShardCollectives for Copies {
    fn num_ranks(&self) -> usize {
        self.0
    }

    fn gather(&self, _: Tensor<2>) -> Tensor<2> {
        unreachable!("GPUs gather bytes")
    }

    fn gather_bytes(&self, own: Tensor<2, Int>) -> Tensor<2, Int> {
        let [rows, cols] = own.dims();
        let place = (own.device(), own.dtype());
        let bytes = own.into_data().as_bytes().repeat(self.0);
        let data = TensorData::new(bytes, [self.0 * rows, cols]);
        Tensor::from_data(data, (&place.0, place.1))
    }

    fn reduce_scatter(&self, partial: Tensor<2>) -> Tensor<2> {
        let rows = partial.dims()[0] / self.0;
        partial.narrow(0, 0, rows)
    }
}

/// The bits of the result and of the gradients of input and weight, of a layer whose tokens are
/// `copies` times those of `x` and of `dy`, and which gathers them if it has shards of a matrix.
fn run_shards(
    [x, w, dy]: &[TensorData; 3],
    [of_x, of_dy]: [usize; 2],
    shards: Option<SequenceShards>,
    dtype: DType,
) -> Result<[Vec<u32>; 3], String> {
    let device = Device::cuda(0);
    let inner = |data: &TensorData, copies: usize| {
        let x = Tensor::<2>::from_data(data.clone(), (&device, dtype));
        Tensor::cat(vec![x; copies], 0)
    };
    let [x, w] = [inner(x, of_x), inner(w, 1)].map(|x| Tensor::from_inner(x).require_grad());
    let recipe = QuantizationRecipe {
        scaling: Scaling::Tensor,
        forward: SmallFloat::E4m3,
        gradients: SmallFloat::E5m2,
        power_of_two_scales: false,
    };
    let quantization = LinearQuantization {
        shards,
        ..LinearQuantization::new(recipe)
    };
    let options = LinearOptions::default();
    let y = quantized_linear(x.clone(), w.clone(), None, options, quantization);
    let dy = Tensor::from_inner(inner(dy, of_dy));
    let grads = (y.clone() * dy).sum().backward();
    let bits = |x: Tensor<2>| Ok::<_, String>(host(x)?.into_iter().map(f32::to_bits).collect());
    let no = "no gradient";
    Ok([
        bits(y.inner())?,
        bits(x.grad(&grads).ok_or(no)?)?,
        bits(w.grad(&grads).ok_or(no)?)?,
    ])
}

fn gathered() -> Result<(), String> {
    for (ranks, [tokens, inputs, outputs]) in [
        (2, [64, 128, 48]),
        (3, [37, 272, 144]),
        (2, [131, 48, 400]),
        (3, [5, 33, 65]),
    ] {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            if !part::is_mine() {
                continue;
            }
            let over = || Arc::new(Copies(ranks));
            let w = normal([inputs, outputs], dtype);
            for of in [MatrixRole::Input, MatrixRole::Gradient] {
                let is_input = of == MatrixRole::Input;
                let [of_x, of_dy] = if is_input { [1, ranks] } else { [ranks, 1] };
                let x = normal([of_x * tokens, inputs], dtype);
                let dy = normal([of_dy * tokens, outputs], dtype);
                let data = [x, w.clone(), dy];
                let shards = SequenceShards { of, over: over() };
                let found = run_shards(&data, [1, 1], Some(shards), dtype)?;
                let whole = run_shards(&data, [of_dy, of_x], None, dtype)?;
                // The rows of this rank come first.
                let is_same = found.iter().zip(&whole).all(|(a, b)| b.starts_with(a));
                if !is_same || found[2].len() != inputs * outputs {
                    let sizes = format!("{tokens} tokens, {inputs}, {outputs}");
                    return Err(format!("{of:?} of {ranks} ranks, {sizes}, {dtype:?}"));
                }
            }
        }
    }
    Ok(())
}
