use burn::tensor::{BoolStore, DType};
use megaburn_torch as torch;
use safetensors::Dtype;

const PAIRS: [(DType, Dtype); 12] = [
    (DType::F64, Dtype::F64),
    (DType::F32, Dtype::F32),
    (DType::F16, Dtype::F16),
    (DType::BF16, Dtype::BF16),
    (DType::I64, Dtype::I64),
    (DType::I32, Dtype::I32),
    (DType::I16, Dtype::I16),
    (DType::I8, Dtype::I8),
    (DType::U64, Dtype::U64),
    (DType::U32, Dtype::U32),
    (DType::U16, Dtype::U16),
    (DType::U8, Dtype::U8),
];

/// The safetensors name of an element type, if it has one.
pub(crate) fn to_file(dtype: DType) -> Option<Dtype> {
    PAIRS
        .iter()
        .find(|(burn, _)| *burn == dtype)
        .map(|(_, file)| *file)
}

/// Bytes per element.
pub(crate) fn size(dtype: Dtype) -> usize {
    dtype.bitsize() / 8
}

/// The element type of a safetensors name, if megaburn reads it.
pub(crate) fn from_file(dtype: Dtype) -> Option<DType> {
    PAIRS
        .iter()
        .find(|(_, file)| *file == dtype)
        .map(|(burn, _)| *burn)
}

/// Booleans: no parameter has this type, but published models contain boolean masks.
const BOOL: (DType, Dtype) = (DType::Bool(BoolStore::Native), Dtype::BOOL);

/// Like [`to_file`], for published models.
pub(crate) fn to_hf(dtype: DType) -> Option<Dtype> {
    to_file(dtype).or((dtype == BOOL.0).then_some(BOOL.1))
}

/// The element type of a tensor of PyTorch, if megaburn reads it.
pub(crate) fn from_torch(dtype: torch::DType) -> Option<DType> {
    use torch::DType as Torch;
    Some(match dtype {
        Torch::F64 => DType::F64,
        Torch::F32 => DType::F32,
        Torch::F16 => DType::F16,
        Torch::BF16 => DType::BF16,
        Torch::I64 => DType::I64,
        Torch::I32 => DType::I32,
        Torch::I16 => DType::I16,
        Torch::I8 => DType::I8,
        Torch::U64 => DType::U64,
        Torch::U32 => DType::U32,
        Torch::U16 => DType::U16,
        Torch::U8 => DType::U8,
        Torch::Bool => BOOL.0,
        _ => return None,
    })
}

/// Like [`from_file`], for published models.
pub(crate) fn from_hf(dtype: Dtype) -> Option<DType> {
    from_file(dtype).or((dtype == BOOL.1).then_some(BOOL.0))
}
