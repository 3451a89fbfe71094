use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cudarc::cublaslt::sys::cublasLtMatmulMatrixScale_t as ScaleMode;

use super::element::Fp8Kind;

/// A matrix of FP8 numbers: an element is its number in `values` times its factor in `scale_inv`.
///
/// # Shapes
/// - `values`: `[rows, k]` in u8, the bytes of the numbers; rows are contiguous and begin at
///   multiples of 16 bytes
/// - `scale_inv`: [`Fp8Scaling::shape`] in f32, contiguous
#[derive(Clone, Debug)]
pub struct Fp8Matrix {
    /// The FP8 numbers.
    pub values: CubeTensor,
    /// The factors.
    pub scale_inv: CubeTensor,
    /// What shares a factor.
    pub scaling: Fp8Scaling,
    /// The format of `values`.
    pub kind: Fp8Kind,
}

/// Which elements of an [`Fp8Matrix`] share a factor.
///
/// Source: NVIDIA, cuBLAS 13.0, "8-bit Floating Point Data Types (FP8) Usage".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fp8Scaling {
    /// All elements.
    Matrix,
    /// 128 neighbours of a row. The number of rows is a multiple of 4.
    Neighbors,
    /// Blocks of 128 rows and 128 columns. Products take one such operand at most.
    Blocks,
}

/// The neighbours, and the rows and columns of a block, that share a factor.
pub const FP8_BLOCK: usize = 128;

impl Fp8Scaling {
    /// The shape of the factors of a matrix `[rows, k]`: those of neighbours are transposed, and the
    /// rows of those of blocks are padded to a multiple of 4.
    pub fn shape(self, [rows, k]: [usize; 2]) -> Vec<usize> {
        let blocks = k.div_ceil(FP8_BLOCK);
        match self {
            Self::Matrix => vec![1],
            Self::Neighbors => vec![blocks, rows],
            Self::Blocks => vec![rows.div_ceil(FP8_BLOCK), blocks.next_multiple_of(4)],
        }
    }

    /// Its name in cuBLASLt.
    pub(super) fn mode(self) -> ScaleMode {
        match self {
            Self::Matrix => ScaleMode::CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F,
            Self::Neighbors => ScaleMode::CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
            Self::Blocks => ScaleMode::CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F,
        }
    }
}

impl Fp8Matrix {
    /// A matrix whose elements share the factor `scale_inv`, `[1]`.
    pub fn with_one_scale(values: CubeTensor, scale_inv: CubeTensor, kind: Fp8Kind) -> Self {
        Self {
            values,
            scale_inv,
            scaling: Fp8Scaling::Matrix,
            kind,
        }
    }

    /// Refuses tensors that are not an FP8 matrix.
    pub(super) fn check(&self) -> Result<(), String> {
        let [shape, scale] = [&self.values, &self.scale_inv].map(|x| x.meta.shape().as_slice());
        let &[rows, k] = shape else {
            return Err(format!("FP8 numbers are a matrix, not {shape:?}"));
        };
        if self.values.dtype != DType::U8 {
            let dtype = self.values.dtype.name();
            return Err(format!("FP8 numbers are stored in u8, not {dtype}"));
        }
        let expected = self.scaling.shape([rows, k]);
        if self.scale_inv.dtype != DType::F32
            || scale != expected
            || !self.scale_inv.is_contiguous()
        {
            return Err(format!(
                "the factors of {shape:?} are {expected:?} contiguous f32, not {scale:?} {}",
                self.scale_inv.dtype.name()
            ));
        }
        if self.scaling == Fp8Scaling::Neighbors && !rows.is_multiple_of(4) {
            return Err(format!(
                "{rows} rows with a factor for each 128 neighbours must be a multiple of 4: pad them"
            ));
        }
        Ok(())
    }
}
