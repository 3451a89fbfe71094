//! Models as published on Hugging Face: a folder with `config.json` and safetensors files, or the
//! files of PyTorch that came before them.

mod dir;
mod json;
mod permuted;
mod quantized;
mod read;
mod rectangles;
mod safetensors;
mod stacked;
mod tensor;
mod torch;
mod view;
mod warn_once;
mod weights;
mod write;

pub use dir::{HfDir, stacked_row};
pub use quantized::{HfQuantization, QUANTIZATION, check_method};
pub use stacked::StackedRows;
pub use tensor::HfTensor;
pub use view::{HfEntry, HfView};
pub use write::{HfWriteOptions, HfWritten, write_hf};

/// The files of a published model other than its weights.
pub const SMALL_FILES: [&str; 14] = [
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "spiece.model",
    "tiktoken.model",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
];

/// The folder in which a checkpoint or a run keeps the [`SMALL_FILES`] of its original model.
pub const ASSETS: &str = "hf";

/// The model's configuration.
const CONFIG: &str = "config.json";
/// All tensors, if they are in one file.
const SINGLE: &str = "model.safetensors";
/// The file of each tensor, if they are in several files.
const INDEX: &str = "model.safetensors.index.json";
/// The same of PyTorch's files.
const TORCH_SINGLE: &str = "pytorch_model.bin";
const TORCH_INDEX: &str = "pytorch_model.bin.index.json";
