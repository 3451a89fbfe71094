//! What the classes of tokenizers in `transformers` 5 make of a `tokenizer.json`.
//!
//! A class takes the vocabulary, the merges, the added tokens and the post-processor from the file,
//! but normalizes and divides texts by its own rules. Source: `transformers`,
//! `tokenization_utils_tokenizers.py`, `models/auto/tokenization_auto.py`, and the file
//! `tokenization_*.py` of each model.

mod checks;
mod resolve;

use serde_json::{Value, json};
use tokenizers::{ModelWrapper, NormalizerWrapper, PreTokenizerWrapper};

use super::encoder::{Encoder, EncoderModel, EncoderNormalizer};

pub(super) use resolve::{Resolved, resolve};

/// A class that replaces parts of `tokenizer.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    Bert,
    Gemma,
    Gpt2,
    Llama,
    Qwen2,
    T5,
}

/// The names of the classes, without the ending `Fast`.
const CLASSES: [(&str, Class); 6] = [
    ("BertTokenizer", Class::Bert),
    ("GemmaTokenizer", Class::Gemma),
    ("GPT2Tokenizer", Class::Gpt2),
    ("LlamaTokenizer", Class::Llama),
    ("Qwen2Tokenizer", Class::Qwen2),
    ("T5Tokenizer", Class::T5),
];
/// Source: `models/qwen2/tokenization_qwen2.py`.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

impl Class {
    fn name(self) -> &'static str {
        let found = CLASSES.iter().find(|(_, class)| *class == self);
        found.map_or("", |(name, _)| name)
    }

    /// The tokenizer that the class makes of `encoder`, which was read from `bytes`, and what it
    /// changes; `None` if it changes nothing.
    ///
    /// # Errors
    /// They say why the result is not known.
    pub(super) fn apply(
        self,
        encoder: &Encoder,
        bytes: &[u8],
        files: [&Value; 2],
    ) -> Result<Option<(Encoder, String)>, String> {
        let name = self.name();
        self.check_tokens(encoder, files)?;
        self.check_model(encoder, bytes, files)?;
        let (normalizer, pre_tokenizer) = self.parts(encoder, files[0]);
        let fails =
            |error: serde_json::Error| format!("the class {name} cannot be followed: {error}");
        let normalizer: Option<NormalizerWrapper> =
            serde_json::from_value(normalizer).map_err(fails)?;
        let pre_tokenizer: Option<PreTokenizerWrapper> =
            serde_json::from_value(pre_tokenizer).map_err(fails)?;
        let found = match encoder.get_normalizer() {
            Some(EncoderNormalizer::Library(found)) => Some(found),
            _ => None,
        };
        let old = [json!(found), json!(encoder.get_pre_tokenizer())].map(without_offsets);
        let new = [json!(normalizer), json!(pre_tokenizer)].map(without_offsets);
        let model = self.model(encoder);
        if old == new && model.is_none() {
            return Ok(None);
        }
        let mut changed = encoder.clone();
        if let Some(model) = model {
            changed.with_model(model);
        }
        changed.with_pre_tokenizer(pre_tokenizer);
        changed
            .with_normalizer(normalizer.map(EncoderNormalizer::Library))
            .map_err(|error| error.to_string())?;
        Ok(Some((changed, format!("{name} {new:?}"))))
    }

    /// The normalizer and the pre-tokenizer of the class.
    fn parts(self, encoder: &Encoder, config: &Value) -> (Value, Value) {
        let flag = |key: &str, usual: bool| config[key].as_bool().unwrap_or(usual);
        let byte_level = |use_regex: bool| {
            json!({
                "type": "ByteLevel", "trim_offsets": true, "use_regex": use_regex,
                "add_prefix_space": flag("add_prefix_space", false),
            })
        };
        let metaspace = |scheme: &str, split: bool| json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": split});
        match self {
            Self::Bert => (
                json!({
                    "type": "BertNormalizer", "clean_text": true, "strip_accents": config["strip_accents"],
                    "handle_chinese_chars": flag("tokenize_chinese_chars", true),
                    "lowercase": flag("do_lower_case", true),
                }),
                json!({"type": "BertPreTokenizer"}),
            ),
            Self::Gemma => (
                json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"}),
                json!({
                    "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
                    "invert": false,
                }),
            ),
            Self::Gpt2 => (Value::Null, byte_level(true)),
            Self::Llama => {
                let scheme = match (flag("add_prefix_space", true), flag("legacy", false)) {
                    (false, _) => "never",
                    (true, true) => "always",
                    (true, false) => "first",
                };
                (Value::Null, metaspace(scheme, false))
            }
            Self::Qwen2 => {
                let split = json!({
                    "type": "Split", "pattern": {"Regex": QWEN2}, "behavior": "Isolated", "invert": false,
                });
                let parts =
                    json!({"type": "Sequence", "pretokenizers": [split, byte_level(false)]});
                (json!({"type": "NFC"}), parts)
            }
            Self::T5 => {
                let parts = [
                    json!({"type": "WhitespaceSplit"}),
                    metaspace("always", true),
                ];
                let charsmap = match encoder.get_normalizer() {
                    Some(EncoderNormalizer::Library(normalizer)) => precompiled(&json!(normalizer)),
                    _ => Value::Null,
                };
                (
                    charsmap,
                    json!({"type": "Sequence", "pretokenizers": parts}),
                )
            }
        }
    }

    /// The model of the class, if it is other than that of `encoder`.
    fn model(self, encoder: &Encoder) -> Option<EncoderModel> {
        let EncoderModel::Library(ModelWrapper::BPE(model)) = encoder.get_model() else {
            return None;
        };
        let byte_fallback = self.has_byte_fallback();
        if model.byte_fallback == byte_fallback && !model.ignore_merges {
            return None;
        }
        let mut model = model.clone();
        model.byte_fallback = byte_fallback;
        model.ignore_merges = false;
        Some(EncoderModel::Library(model.into()))
    }

    fn has_byte_fallback(self) -> bool {
        matches!(self, Self::Gemma | Self::Llama)
    }
}

/// The first compiled map of characters in a normalizer.
fn precompiled(normalizer: &Value) -> Value {
    let is_map = |part: &&Value| part["type"] == "Precompiled";
    let parts = normalizer["normalizers"].as_array();
    let part = parts.and_then(|parts| parts.iter().find(is_map));
    Some(normalizer)
        .filter(is_map)
        .or(part)
        .cloned()
        .unwrap_or_default()
}

/// A part of a tokenizer without what changes offsets only.
fn without_offsets(mut part: Value) -> Value {
    match &mut part {
        Value::Object(fields) => {
            fields.remove("trim_offsets");
            for value in fields.values_mut() {
                *value = without_offsets(value.take());
            }
        }
        Value::Array(values) => {
            for value in values {
                *value = without_offsets(value.take());
            }
        }
        _ => {}
    }
    part
}
