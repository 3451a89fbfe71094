//! Models as Hugging Face publishes them: a folder of `config.json` and safetensors files.

mod dir;
mod read;
mod view;
mod write;

pub use dir::HfDir;
pub use view::{HfEntry, HfView};
pub use write::{HfWriteOptions, HfWritten, write_hf};

/// The files of a published model that are no weights.
pub const SMALL_FILES: [&str; 11] = [
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
];

/// The folder in which a checkpoint or a run keeps those that its model came with.
pub const ASSETS: &str = "hf";

/// What the model is.
const CONFIG: &str = "config.json";
/// All tensors, where they stand in one file.
const SINGLE: &str = "model.safetensors";
/// Where each tensor is, where they stand in several.
const INDEX: &str = "model.safetensors.index.json";
