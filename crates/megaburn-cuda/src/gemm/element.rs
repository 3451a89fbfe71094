use burn::tensor::DType;
use cudarc::cublaslt::sys::cudaDataType;

use super::fp8::Fp8Kind;

/// The number format of a product's operand. Burn has no types for the FP8 formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Element {
    /// A float of Burn's.
    Float(DType),
    /// An FP8 format, stored as bytes.
    Fp8(Fp8Kind),
}

impl Element {
    /// The number of bytes of an element.
    pub(super) fn size(self) -> usize {
        match self {
            Self::Float(dtype) => dtype.size(),
            Self::Fp8(_) => 1,
        }
    }

    /// The format in CUDA's libraries.
    pub(super) fn data_type(self) -> cudaDataType {
        match self {
            Self::Float(DType::BF16) => cudaDataType::CUDA_R_16BF,
            Self::Float(DType::F16) => cudaDataType::CUDA_R_16F,
            Self::Float(_) => cudaDataType::CUDA_R_32F,
            Self::Fp8(Fp8Kind::E4m3) => cudaDataType::CUDA_R_8F_E4M3,
            Self::Fp8(Fp8Kind::E5m2) => cudaDataType::CUDA_R_8F_E5M2,
        }
    }
}
