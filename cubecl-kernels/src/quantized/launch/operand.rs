use burn::backend::Cube;
use burn::backend::tensor::FloatTensor;
use burn_cubecl::tensor::CubeTensor;
use megaburn_cuda::gemm::{Fp8Kind, Fp8Matrix};
use megaburn_cuda::tensor;

use super::block_cast::BlockCast;
use super::cast::Cast;
use crate::gemm_ops::swapped;
use crate::quantized::operands::{Quantization, Quantized};
use crate::quantized::recipe::SummedDim;

/// A quantised matrix on a GPU, with the dimension that a product sums over last.
#[derive(Clone, Debug)]
pub(crate) enum CubeOperand {
    /// For tensor cores, with one scale.
    Fp8(Box<Fp8Matrix>),
    /// For tensor cores, with several scales. Only the first `rows` are those of the matrix; the
    /// others are 0.
    Fp8Blocks { matrix: Box<Fp8Matrix>, rows: usize },
    /// The numbers that the elements stand for, in f32.
    Numbers(Box<FloatTensor<Cube>>),
}

impl Cast {
    /// The operands of a matrix with one scale.
    pub(super) fn operands(self, kind: Fp8Kind) -> Quantized<CubeOperand> {
        let scale_inv = self.scale_inv;
        let matrix = |values| {
            let scale_inv = scale_inv.clone();
            CubeOperand::Fp8(Box::new(Fp8Matrix::with_one_scale(values, scale_inv, kind)))
        };
        Quantized {
            rows: self.transposed.map(matrix),
            cols: self.straight.map(matrix),
        }
    }
}

impl BlockCast {
    /// The operands of a matrix with `rows` rows.
    pub(super) fn operands(self, rows: usize) -> Quantized<CubeOperand> {
        let operand = |matrix: Fp8Matrix, rows| CubeOperand::Fp8Blocks {
            matrix: Box::new(matrix),
            rows,
        };
        Quantized {
            rows: self.transposed.map(|matrix| {
                let cols = matrix.values.meta.shape()[0];
                operand(matrix, cols)
            }),
            cols: self.straight.map(|matrix| operand(matrix, rows)),
        }
    }
}

/// The operands of a matrix of which `along` has the numbers, quantised along a dimension.
pub(super) fn numbers_along(
    how: &Quantization,
    along: impl Fn(SummedDim) -> CubeTensor,
) -> Quantized<CubeOperand> {
    let along = |summed| tensor::into_backend(along(summed));
    let operand = |numbers| CubeOperand::Numbers(Box::new(numbers));
    Quantized {
        rows: how
            .rows
            .then(|| operand(swapped::<Cube>(along(SummedDim::Rows)))),
        cols: how.cols.then(|| operand(along(SummedDim::Cols))),
    }
}
