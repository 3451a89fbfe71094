//! Weights in FP8, with the scales by which their codes are multiplied.

mod bytes;
mod encode;
mod float8;
mod form;
mod found;
mod method;
mod scaling;
mod tensors;

pub(in crate::hf) use encode::Encoder;
pub(in crate::hf) use float8::Float8;
pub use form::HfQuantization;
pub(in crate::hf) use found::{Codes, Found, FoundTensors};
pub(in crate::hf) use method::with_method_of_file;
pub use method::{QUANTIZATION, check_method};
pub(in crate::hf) use tensors::{Readable, readable};
