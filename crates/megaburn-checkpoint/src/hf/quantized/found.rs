//! The tensors of files, before it is known which of them can be read.

use std::{collections::BTreeMap, sync::Arc};

use super::float8::Float8;
use crate::{hf::tensor::HfTensor, tensor_bytes::TensorBytes};

/// The tensors of one or several files, by name.
pub(in crate::hf) type FoundTensors = BTreeMap<String, Found>;

/// A tensor of a file.
#[derive(Clone, Debug)]
pub(in crate::hf) enum Found {
    /// Its elements are read as they are.
    Plain(HfTensor),
    /// It has FP8 codes.
    Codes(Codes),
    /// Its elements are of a type with this name, which is not read.
    Unreadable {
        dtype: String,
        bytes: Arc<dyn TensorBytes>,
    },
}

/// A tensor of FP8 codes, of one byte each.
#[derive(Clone, Debug)]
pub(in crate::hf) struct Codes {
    pub(in crate::hf) format: Float8,
    pub(in crate::hf) shape: Vec<usize>,
    pub(in crate::hf) bytes: Arc<dyn TensorBytes>,
    /// The place of the first code.
    pub(in crate::hf) start: u64,
}

/// The scales of a tensor.
#[derive(Debug)]
pub(super) enum Scales {
    Floats(HfTensor),
    /// Powers of two, in E8M0.
    Codes(Codes),
}
