//! Quantised products on GPUs: those of FP8 matrices by tensor cores, if their sizes and the GPU
//! allow, and all others by the numbers that their elements stand for.

mod amax;
mod block_cast;
mod cast;
mod cells;
mod loads;
mod numbers;
mod nvfp4;
mod operand;
mod product;
mod sent_weight;
mod transpose;

use std::ops::Range;

use burn::backend::Cube;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, FloatDType, Tensor};
use burn_cubecl::tensor::CubeTensor;
use megaburn_autograd::IntoPrimitive;
use megaburn_autograd::backend_ops::slice_rows;
use megaburn_cuda::gemm::{self, FP8_BLOCK, Fp8IntoOptions, Fp8Kind, Fp8ProductOptions};
use megaburn_cuda::tensor;

use crate::quantized::format::SmallFloat;
use crate::quantized::kernels::BlockScale;
use crate::quantized::operands::{
    ProductOf, Quantization, Quantized, QuantizedOps, RANGE_ALGORITHM, quantize_each,
};
use crate::quantized::recipe::{MatrixRole, Scaling};
use crate::quantized::sequence_shards::ShardCollectives;
pub use amax::amax;
use amax::amaxes;
use block_cast::block_values;
pub use block_cast::{BlockCast, BlockCastOptions, block_cast};
use cast::cast_ranges;
pub use cast::{Cast, CastOptions, cast};
pub(crate) use cells::{AmaxCells, from_bits, no_amax};
use numbers::{BlockOptions, block_numbers, numbers};
use nvfp4::{Nvfp4Options, nvfp4_numbers};
use operand::{CubeOperand, numbers_along};
use product::Operands;
pub(super) use sent_weight::{largest_magnitude, packed_weight, unpacked_weight};
use transpose::transposed_bytes;

use crate::gemm_ops::cube::done;
use crate::gemm_ops::{GemmAlgorithm, swapped};
use crate::gradient_accumulation_fusion::GradAccumFusion;

impl QuantizedOps for Cube {
    type Operand = CubeOperand;

    fn largest_magnitude(x: FloatTensor<Self>) -> FloatTensor<Self> {
        tensor::into_backend(amax(tensor::from_backend(x)))
    }

    fn largest_magnitudes(x: FloatTensor<Self>, rows: &[Range<usize>]) -> FloatTensor<Self> {
        tensor::into_backend(amaxes(tensor::from_backend(x), rows))
    }

    fn quantize_ranges(
        x: FloatTensor<Self>,
        rows: &[Range<usize>],
        amaxes: Option<FloatTensor<Self>>,
        how: Quantization,
    ) -> Vec<Option<Quantized<CubeOperand>>> {
        let format = how.recipe.format(how.role);
        match (amaxes, kind(format)) {
            (Some(amaxes), Some(kind)) => {
                let options = CastOptions::of(&how, kind);
                let [x, amaxes] = [x, amaxes].map(tensor::from_backend);
                let casts = cast_ranges(x, rows, amaxes, options).into_iter();
                casts.map(|cast| Some(cast?.operands(kind))).collect()
            }
            (amaxes, _) => quantize_each::<Self>(x, rows, amaxes, how),
        }
    }

    fn products_of_ranges(
        like: &FloatTensor<Self>,
        (rows, columns): (&[Range<usize>], usize),
        operands: impl Iterator<Item = (Option<CubeOperand>, CubeOperand)>,
        dtype: FloatDType,
        of: ProductOf,
    ) -> FloatTensor<Self> {
        let like = tensor::from_backend(like.clone());
        let num_rows = rows.iter().map(Range::len).sum::<usize>();
        if num_rows * columns == 0 {
            operands.for_each(drop);
            return tensor::into_backend(tensor::empty(&like, [num_rows, columns], dtype.into()));
        }
        let whole = tensor::empty(&like, [num_rows * columns], dtype.into());
        let mut parts = Vec::new();
        let mut are_in_place = true;
        for ((a, b), rows) in operands.zip(rows) {
            let Some(a) = a else { continue };
            let shape = [rows.len(), columns];
            let room = tensor::slice_of(&whole, rows.start * columns, shape);
            parts.push(match (Operands::new(a, b), room) {
                (Operands::Fp8 { a, b, padding: 0 }, Some(room)) => {
                    let options = Fp8IntoOptions {
                        add: false,
                        tune: false,
                        fast_accum: of == ProductOf::Result,
                        sums_tokens: false,
                    };
                    done(gemm::fp8_product_into(*a, *b, &room, options));
                    Self::wrap::<2>(tensor::into_backend(room))
                }
                (both, _) => {
                    are_in_place = false;
                    Self::wrap(both.multiplied(dtype, of, RANGE_ALGORITHM))
                }
            });
        }
        let joined = if are_in_place {
            Self::wrap::<1>(tensor::into_backend(whole)).reshape([num_rows, columns])
        } else {
            Tensor::cat(parts, 0)
        };
        Self::unwrap(joined)
    }

    fn quantize_matrix(
        x: FloatTensor<Self>,
        amax: Option<FloatTensor<Self>>,
        how: Quantization,
    ) -> Quantized<CubeOperand> {
        let recipe = how.recipe;
        let format = recipe.format(how.role);
        let Some(kind) = kind(format) else {
            let amax = amax.expect("NVFP4 is given the largest magnitude");
            return numbers_along(&how, |summed| {
                let x = tensor::from_backend(how.source::<Self>(x.clone(), summed));
                let options = Nvfp4Options {
                    block: recipe.block(how.role, summed),
                    amax_index: how.amax_index(summed),
                    drawn: how.drawn([x.meta.shape()[0], x.meta.shape()[1]], summed),
                };
                nvfp4_numbers(x, tensor::from_backend(amax.clone()), options)
            });
        };
        if let Some(amax) = amax {
            let [x, amax] = [x, amax].map(tensor::from_backend);
            return cast(x, amax, CastOptions::of(&how, kind)).operands(kind);
        }
        let x = tensor::from_backend(x);
        let shape = [x.meta.shape()[0], x.meta.shape()[1]];
        if let Some(options) = BlockCastOptions::of(&how, kind, shape)
            && takes_blocks(&x)
        {
            return block_cast(x, options).operands(shape[0]);
        }
        numbers_along(&how, |summed| {
            let options = BlockOptions {
                kind,
                largest: format.largest(),
                rule: match (recipe.scaling, recipe.power_of_two_scales) {
                    (Scaling::Microscaling, _) => BlockScale::Microscale,
                    (_, true) => BlockScale::PowerOfTwo,
                    (_, false) => BlockScale::Exact,
                },
                block: recipe.block(how.role, summed),
            };
            block_numbers(x.clone(), options)
        })
    }

    fn numbers_of(operand: CubeOperand) -> FloatTensor<Self> {
        match operand {
            CubeOperand::Fp8(matrix) => tensor::into_backend(numbers(*matrix)),
            CubeOperand::Fp8Blocks { matrix, rows } => {
                let padded = tensor::into_backend(block_values(*matrix));
                slice_rows::<Self>(padded, 0, 0..rows)
            }
            CubeOperand::Numbers(numbers) => *numbers,
        }
    }

    fn gathered(own: CubeOperand, over: &dyn ShardCollectives) -> CubeOperand {
        match own {
            CubeOperand::Fp8(mut own) => {
                let bytes = tensor::into_backend(own.values);
                let bytes = over.gather_bytes(Tensor::from_primitive::<Self>(bytes));
                own.values = tensor::from_backend(Self::unwrap_int(bytes));
                CubeOperand::Fp8(own)
            }
            other => {
                let own = Self::numbers_of(other);
                CubeOperand::Numbers(Box::new(Self::unwrap(over.gather(Self::wrap(own)))))
            }
        }
    }

    fn transposed(operand: CubeOperand) -> CubeOperand {
        match operand {
            CubeOperand::Fp8(mut matrix) => {
                matrix.values = transposed_bytes(matrix.values);
                CubeOperand::Fp8(matrix)
            }
            other => CubeOperand::Numbers(Box::new(swapped::<Self>(Self::numbers_of(other)))),
        }
    }

    fn quantized_product(
        a: CubeOperand,
        b: CubeOperand,
        dtype: FloatDType,
        of: ProductOf,
        algorithm: GemmAlgorithm,
    ) -> FloatTensor<Self> {
        Operands::new(a, b).multiplied(dtype, of, algorithm)
    }

    fn add_quantized_product(
        a: CubeOperand,
        b: CubeOperand,
        sum: Option<Tensor<2>>,
        room: Option<Tensor<2>>,
        algorithm: GemmAlgorithm,
    ) -> Tensor<2> {
        let tune = algorithm == GemmAlgorithm::Tuned;
        match Operands::new(a, b) {
            Operands::Fp8 { a, b, .. } => {
                let add = sum.is_some();
                let Some(into) = sum.or(room) else {
                    let options = Fp8ProductOptions {
                        dtype: DType::F32,
                        tune,
                        fast_accum: false,
                        sums_tokens: true,
                    };
                    let product = done(gemm::fp8_product(*a, *b, options));
                    return Self::wrap(tensor::into_backend(product));
                };
                let into = tensor::from_backend(Self::unwrap(into));
                let options = Fp8IntoOptions {
                    add,
                    tune,
                    fast_accum: false,
                    sums_tokens: true,
                };
                done(gemm::fp8_product_into(*a, *b, &into, options));
                Self::wrap(tensor::into_backend(into))
            }
            Operands::Numbers(both) => {
                let [a, b] = *both;
                Self::add_weight_gradient(
                    swapped::<Self>(a),
                    swapped::<Self>(b),
                    sum,
                    room,
                    algorithm,
                )
            }
        }
    }
}

impl BlockCastOptions {
    /// The cast of a matrix with several scales, if tensor cores multiply matrices of its sizes with
    /// such scales.
    fn of(how: &Quantization, kind: Fp8Kind, [rows, cols]: [usize; 2]) -> Option<Self> {
        let square = how.role == MatrixRole::Weight;
        let is_whole = |size: usize| size > 0 && size.is_multiple_of(FP8_BLOCK);
        let fits = is_whole(cols) && rows > 0 && (!square || is_whole(rows));
        (how.recipe.scaling == Scaling::Blocks && fits).then(|| Self {
            kind,
            largest: how.recipe.format(how.role).largest(),
            power_of_two: how.recipe.power_of_two_scales,
            square,
            straight: how.cols,
            transposed: how.rows,
        })
    }
}

/// Whether the GPU of a matrix multiplies matrices with several scales.
fn takes_blocks(x: &CubeTensor) -> bool {
    let device = Cube::wrap::<2>(tensor::into_backend(x.clone())).device();
    gemm::takes_fp8_blocks(&device)
}

impl CastOptions {
    /// The cast of a matrix with one scale.
    fn of(how: &Quantization, kind: Fp8Kind) -> Self {
        Self {
            kind,
            largest: how.recipe.format(how.role).largest(),
            power_of_two: how.recipe.power_of_two_scales,
            straight: how.cols,
            transposed: how.rows,
        }
    }
}

/// The format of a product on tensor cores, if it is one.
fn kind(format: SmallFloat) -> Option<Fp8Kind> {
    match format {
        SmallFloat::E5m2 => Some(Fp8Kind::E5m2),
        SmallFloat::E4m3 => Some(Fp8Kind::E4m3),
        SmallFloat::E2m1 => None,
    }
}
