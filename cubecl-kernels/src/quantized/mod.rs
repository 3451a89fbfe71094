//! Linear maps of quantised matrices: FP8 and the emulated formats of newer GPUs.

mod amax;
mod counts;
mod fallback;
mod format;
mod found;
pub(crate) mod grouped;
mod hadamard;
mod kept;
#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "cuda")]
pub(crate) mod launch;
mod op;
pub(crate) mod operands;
mod options;
mod random_numbers;
mod recipe;
#[cfg(test)]
mod reference;
mod scale;
mod sent_weight;
mod sequence_shards;
#[cfg(test)]
mod tests;

#[cfg(feature = "cuda")]
use burn::backend::DispatchDevice;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, TensorMetadata, backend_extension};
use burn::tensor::{Device, Tensor};
use megaburn_autograd::backend_ops::slice_rows;
use megaburn_autograd::{fused, on_every_backend};

pub use amax::{AmaxReduction, AmaxSource, DelayedAmax};
pub use counts::{MatrixCounts, QuantizationCounts};
pub use format::SmallFloat;
pub use found::{FoundAmax, FoundAmaxes};
pub use kept::{KeptWeight, UnchangedWeights, WeightSpan};
pub use options::LinearQuantization;
pub use random_numbers::RandomNumbers;
pub use recipe::{MatrixRole, Nvfp4, QuantizationRecipe, Scaling, SummedDim};
pub use scale::Scale;
pub use sent_weight::{SentAmax, SentScale, largest_magnitude};
pub use sequence_shards::{SequenceShards, ShardCollectives};

use crate::gemm_ops::swapped;
use crate::linear::LinearOptions;
use op::QuantizedLinear;
use operands::{Quantization, QuantizedOps};

/// [`linear`](crate::linear) whose three products multiply quantised matrices: `y = q(x) q(w)`,
/// `dx = q(dy) q(w)ᵀ` and `dw = q(x)ᵀ q(dy)`. The bias is added to the result as it is.
///
/// The formats and scales are those of [`LinearQuantization::recipe`]; a matrix is quantised along
/// the dimension that its product sums over. Sums are in f32. Where products are
/// [emulated](is_emulated()) they are those of the numbers that the quantised elements stand for, so
/// that all devices give the same result up to the order of sums. A matrix with an element that is not
/// finite gives a result of NaN.
///
/// # Shapes
/// - `x`: `[.., in]`
/// - `weight`: `[in, out]`, or `[out, in]` with [`LinearOptions::out_in`]; `bias`: `[out]`
/// - result: `[.., out]`; with [`LinearQuantization::shards`] of the input, the first dimension of `x`
///   is this rank's shard of the sequence and that of the result the whole one; with those of the
///   gradient, the other way round
///
/// # Panics
/// As [`linear`](crate::linear); also if a recipe with several scales in a matrix is given shards.
///
/// # Collective
/// Where [`AmaxSource::Current`] has a reduction, it is called once for each matrix in each pass. The
/// ranks of [`LinearQuantization::shards`] call forward and backward together:
///
/// | shards of | forward | backward |
/// |---|---|---|
/// | the input | gather of q(x) | reduce-scatter of dx; gather of q(x) for dw |
/// | the gradient | reduce-scatter of y | gather of q(dy) |
pub fn quantized_linear<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    options: LinearOptions,
    quantization: LinearQuantization,
) -> Tensor<D> {
    crate::linear::check("quantized_linear", &x, &weight, bias.as_ref(), &options);
    assert!(
        quantization.shards.is_none() || quantization.recipe.scaling == Scaling::Tensor,
        "quantized_linear: quantised shards of tokens are gathered with one scale per matrix only"
    );
    let op = QuantizedLinear {
        options,
        quantization,
    };
    let x = x.into_dispatch();
    let weight = weight.into_dispatch();
    match bias {
        Some(bias) => fused(op, [x, weight, bias.into_dispatch()]),
        None => fused(op, [x, weight]),
    }
}

/// The numbers, in f32, that the elements of a matrix stand for when a linear layer quantises it
/// by its own largest magnitude, for a product that sums over a dimension. If the recipe
/// [transforms](QuantizationRecipe::transforms) the matrix, they are those of the transformed one.
/// Random numbers are those of step 0 of a layer without name.
///
/// # Shapes
/// - `x`: `[rows, cols]`, without autodiff; the result too, or more rows if the matrix is transformed
pub fn quantized_numbers(
    x: Tensor<2>,
    recipe: QuantizationRecipe,
    role: MatrixRole,
    summed: SummedDim,
) -> Tensor<2> {
    let how = Quantization {
        recipe,
        role,
        rows: summed == SummedDim::Rows,
        cols: summed == SummedDim::Cols,
        random: RandomNumbers::new(0, ""),
    };
    Tensor::from_dispatch(<Dispatch as QuantizedNumbers>::numbers(
        x.into_dispatch(),
        how,
    ))
}

/// Whether matrices can be quantised on a device: on CPUs, and on NVIDIA GPUs of compute capability
/// 8.9 or higher, which have the instructions.
pub fn can_quantize(device: &Device) -> bool {
    #[cfg(feature = "cuda")]
    return match device.clone().inner().as_dispatch() {
        DispatchDevice::Cube(_) => megaburn_cuda::gemm::takes_fp8(device),
        _ => true,
    };
    #[cfg(not(feature = "cuda"))]
    {
        let _ = device;
        true
    }
}

/// Whether the products of a recipe are emulated on a device: matrices are rounded to its numbers,
/// which are multiplied in f32. They are on CPUs and, with [`Scaling::Blocks`], on GPUs other than
/// Hopper's; with the scales of newer GPUs everywhere. They also are where the sizes of a weight do not
/// suit tensor cores.
pub fn is_emulated(recipe: &QuantizationRecipe, device: &Device) -> bool {
    #[cfg(feature = "cuda")]
    return !match recipe.scaling {
        Scaling::Tensor => megaburn_cuda::gemm::takes_fp8(device),
        Scaling::Blocks => megaburn_cuda::gemm::takes_fp8_blocks(device),
        Scaling::Microscaling | Scaling::Nvfp4(_) => false,
    };
    #[cfg(not(feature = "cuda"))]
    {
        let _ = (recipe, device);
        true
    }
}

#[backend_extension(
    Cube: cfg(any(feature = "cuda", feature = "wgpu")),
    Flex,
    NdArray: cfg(feature = "ndarray")
)]
trait QuantizedNumbers: Backend {
    fn numbers(x: FloatTensor<Self>, how: Quantization) -> FloatTensor<Self>;
}

on_every_backend! {
    impl QuantizedNumbers {
        fn numbers(x: FloatTensor<Self>, how: Quantization) -> FloatTensor<Self> {
            let needs_amax = how.recipe.needs_amax();
            let amax = needs_amax.then(|| how.amax::<Self>(x.clone()));
            let num_rows = match how.recipe.transforms(how.role, SummedDim::Rows) {
                true => TensorMetadata::shape(&x)[0].next_multiple_of(recipe::NVFP4_BLOCK),
                false => TensorMetadata::shape(&x)[0],
            };
            let found = Self::quantize_matrix(x, amax, how);
            // An operand that sums over the rows may be padded with zeros.
            let rows = found.rows.map(|of| {
                let padded = swapped::<Self>(Self::numbers_of(of));
                slice_rows::<Self>(padded, 0, 0..num_rows)
            });
            let found = rows.or_else(|| found.cols.map(Self::numbers_of));
            found.expect("one dimension is summed over")
        }
    }
}
