use burn::backend::tensor::FloatTensor;
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::FloatDType;
use megaburn_autograd::IntoPrimitive;
use megaburn_autograd::backend_ops::{self, last_dim, slice_rows};
use megaburn_cuda::gemm::{self, Fp8Kind, Fp8Matrix, Fp8ProductOptions, Fp8Scaling};
use megaburn_cuda::tensor;

use super::operand::CubeOperand;
use crate::gemm_ops::cube::done;
use crate::gemm_ops::{GemmAlgorithm, GemmOps, ProductOptions, swapped};
use crate::quantized::operands::{ProductOf, QuantizedOps};

/// Sizes of FP8 products on tensor cores are multiples of this, except for the number of tokens.
const ALIGNED: usize = 16;

/// The operands of a product.
pub(super) enum Operands {
    /// Tensor cores multiply them. The last rows of `a`, and so those of the result, are padding.
    Fp8 {
        a: Box<Fp8Matrix>,
        b: Box<Fp8Matrix>,
        padding: usize,
    },
    /// Their numbers are multiplied.
    Numbers(Box<[FloatTensor<Cube>; 2]>),
}

impl Operands {
    pub(super) fn new(a: CubeOperand, b: CubeOperand) -> Self {
        match (a, b) {
            (CubeOperand::Fp8(a), CubeOperand::Fp8(b)) if are_taken(&a, &b) => {
                Self::Fp8 { a, b, padding: 0 }
            }
            (
                CubeOperand::Fp8Blocks { matrix: a, rows },
                CubeOperand::Fp8Blocks {
                    matrix: b,
                    rows: columns,
                },
            ) if are_taken(&a, &b) && b.values.meta.shape()[0] == columns => {
                let padding = a.values.meta.shape()[0] - rows;
                Self::Fp8 { a, b, padding }
            }
            (a, b) => {
                let [a, b] = [a, b].map(Cube::numbers_of);
                // One that sums over the rows of its matrix may be padded with zeros.
                let k = last_dim(&a.shape()).min(last_dim(&b.shape()));
                let [a, b] = [a, b].map(|x| slice_rows::<Cube>(x, 1, 0..k));
                Self::Numbers(Box::new([a, b]))
            }
        }
    }

    /// `a bᵀ`.
    pub(super) fn multiplied(
        self,
        dtype: FloatDType,
        of: ProductOf,
        algorithm: GemmAlgorithm,
    ) -> FloatTensor<Cube> {
        match self {
            Self::Fp8 { a, b, padding } => {
                let options = Fp8ProductOptions {
                    dtype: dtype.into(),
                    tune: algorithm == GemmAlgorithm::Tuned,
                    fast_accum: of == ProductOf::Result,
                    sums_tokens: of == ProductOf::WeightGradient,
                };
                let product = tensor::into_backend(done(gemm::fp8_product(*a, *b, options)));
                if padding == 0 {
                    return product;
                }
                let rows = product.shape()[0] - padding;
                slice_rows::<Cube>(product, 0, 0..rows)
            }
            Self::Numbers(both) => {
                let [a, b] = *both;
                // cuBLASLt does not round products of f32 matrices.
                let wide = ProductOptions::new(FloatDType::F32).with_algorithm(algorithm);
                backend_ops::cast::<Cube>(Cube::product(a, swapped::<Cube>(b), wide), dtype)
            }
        }
    }
}

fn are_taken(a: &Fp8Matrix, b: &Fp8Matrix) -> bool {
    let [n, k] = [b.values.meta.shape()[0], b.values.meta.shape()[1]];
    // An operand that sums over the rows of its matrix is padded; the other one may not be.
    let are_aligned = n.is_multiple_of(ALIGNED) && k.is_multiple_of(ALIGNED) && k > 0;
    let are_aligned = are_aligned && a.values.meta.shape()[1] == k;
    let are_e5m2 = a.kind == Fp8Kind::E5m2 && b.kind == Fp8Kind::E5m2;
    let are_blocks = a.scaling == Fp8Scaling::Blocks && b.scaling == Fp8Scaling::Blocks;
    let device = Cube::wrap::<1>(tensor::into_backend(a.scale_inv.clone())).device();
    are_aligned && !are_e5m2 && !are_blocks && gemm::takes_fp8(&device)
}
