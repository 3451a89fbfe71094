use serde_json::Value;

use super::{HfJson, KeyDefault, ModelFamily};
use crate::{decoder::DecoderConfig, hf::Key};

/// The definition of a built-in family as a constant, so that a family can take over what it shares
/// with another one. Its fields are the methods of [`ModelFamily`].
#[derive(Clone, Copy, Debug)]
pub(super) struct FamilySpec {
    pub(super) model_type: &'static str,
    pub(super) architecture: &'static str,
    pub(super) other_architectures: &'static [&'static str],
    pub(super) description: &'static str,
    pub(super) keys: &'static [&'static [Key]],
    pub(super) optional_prefix: &'static str,
    pub(super) constants: &'static [&'static str],
    pub(super) layer: &'static str,
    pub(super) template: fn() -> DecoderConfig,
    pub(super) follow: fn(&mut DecoderConfig),
    pub(super) defaults: &'static [&'static [KeyDefault]],
    pub(super) read: fn(&HfJson<'_>) -> Result<DecoderConfig, String>,
    pub(super) write: fn(&DecoderConfig) -> Value,
}

impl ModelFamily for FamilySpec {
    fn model_type(&self) -> &'static str {
        self.model_type
    }

    fn architecture(&self) -> &'static str {
        self.architecture
    }

    fn other_architectures(&self) -> &'static [&'static str] {
        self.other_architectures
    }

    fn description(&self) -> &'static str {
        self.description
    }

    fn template(&self) -> DecoderConfig {
        (self.template)()
    }

    fn follow(&self, config: &mut DecoderConfig) {
        (self.follow)(config);
    }

    fn keys(&self) -> &'static [&'static [Key]] {
        self.keys
    }

    fn optional_prefix(&self) -> &'static str {
        self.optional_prefix
    }

    fn constants(&self) -> &'static [&'static str] {
        self.constants
    }

    fn layer(&self) -> &'static str {
        self.layer
    }

    fn defaults(&self) -> &'static [&'static [KeyDefault]] {
        self.defaults
    }

    fn read(&self, json: &HfJson<'_>) -> Result<DecoderConfig, String> {
        (self.read)(json)
    }

    fn write(&self, config: &DecoderConfig) -> Value {
        (self.write)(config)
    }
}
