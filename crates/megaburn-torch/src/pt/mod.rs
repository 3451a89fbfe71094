//! Files of `torch.save`: `.pt`, `.pth` and `.bin`.

mod contiguous;
mod file;
mod legacy;
mod search;
mod state_dict;
mod tensor;
mod write;

pub use contiguous::ContiguousBytes;
pub use file::PtFile;
pub use tensor::StoredTensor;
pub(crate) use tensor::dtype_of;
pub use write::{PtWriter, tensor_tree};
