use burn::tensor::DType;
use cudarc::cublaslt::sys::cudaDataType;

/// An FP8 number format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fp8Kind {
    /// Four exponent bits and three mantissa bits; the largest number is 448, and there is no
    /// infinity. For weights and activations.
    E4m3,
    /// Five exponent bits and two mantissa bits; the largest number is 57,344. For gradients.
    E5m2,
}

impl Fp8Kind {
    /// The format's name, `e4m3` or `e5m2`.
    pub fn name(self) -> &'static str {
        match self {
            Self::E4m3 => "e4m3",
            Self::E5m2 => "e5m2",
        }
    }
}

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
