use serde_json::Value;

use super::{HfJson, KeyDefault};
use crate::{
    decoder::{DecoderConfig, HeadInit, TokenLosses},
    hf::Key,
};

/// The definition of a model family: the parts of its block, its `config.json`, and the names of
/// its tensors on Hugging Face. The rest of the code knows families only by this trait.
///
/// A crate adds its own family with [`Family::register`](super::Family::register), or with
/// `megaburn::cli::Cli::with_family` for a command line that knows it. `docs/families.md` explains
/// the methods by an example.
pub trait ModelFamily: Send + Sync {
    /// The name: `model_type` in `config.json`, and `model.family` in a configuration.
    fn model_type(&self) -> &'static str;

    /// The name in `architectures` of `config.json`.
    fn architecture(&self) -> &'static str;

    /// Further names in `architectures` of models of the family, which differ in parts. `read` finds
    /// out which one it has by [`HfJson::has_architecture`], and `write` sets `architectures` for
    /// models of these.
    fn other_architectures(&self) -> &'static [&'static str] {
        &[]
    }

    /// One line that tells people which models these are.
    fn description(&self) -> &'static str {
        "A family that this program registers."
    }

    /// The parts of the family's block, with the sizes of a tiny model. `family` is set by the
    /// caller.
    fn template(&self) -> DecoderConfig;

    /// Sets the parts that follow from a model's sizes, such as the layers with a window.
    fn follow(&self, _config: &mut DecoderConfig) {}

    /// The key map: the tensors of a Hugging Face checkpoint from which each parameter is read. The
    /// first line that matches a parameter applies.
    fn keys(&self) -> &'static [&'static [Key]];

    /// A prefix of all names that some checkpoints omit, because they were saved without the head.
    fn optional_prefix(&self) -> &'static str {
        ""
    }

    /// Suffixes of tensors that are not parameters: constants that older checkpoints contain.
    fn constants(&self) -> &'static [&'static str] {
        &[]
    }

    /// The prefix of the names of a layer's tensors; `*` is the number of the layer.
    fn layer(&self) -> &'static str {
        "model.layers.*."
    }

    /// The meaning of optional keys of `config.json` that have no value. If a key has two defaults,
    /// the first one applies.
    fn defaults(&self) -> &'static [&'static [KeyDefault]] {
        &[]
    }

    /// Reads `config.json`. `family` is set by the caller.
    ///
    /// # Errors
    /// A key is missing, or has a value with which the model would compute something else.
    fn read(&self, json: &HfJson<'_>) -> Result<DecoderConfig, String>;

    /// Writes the keys of `config.json`, without `architectures`, `model_type`, `dtype`,
    /// `vocab_size` and `tie_word_embeddings`.
    fn write(&self, config: &DecoderConfig) -> Value;

    /// Builds the family's own [output head](crate::decoder::OutputHead); `None` if the output
    /// projection reads the last norm directly.
    fn head(&self) -> Option<HeadInit> {
        None
    }

    /// The family's own loss; `None` for the cross-entropy.
    fn loss(&self) -> Option<TokenLosses> {
        None
    }
}
