//! How a tokenizer belongs into a model's folder, so that it is the same one there.

use std::{collections::BTreeMap, path::PathBuf};

use serde_json::{Map, Value};

use super::{
    files::{FileKind, is_of_t5},
    hf::HfTokenizer,
    special::read_json,
};
use crate::error::DataError;

/// The class of Transformers that takes any tokenizer as its file says.
const AS_IT_IS: &str = "PreTrainedTokenizerFast";

/// A tokenizer that was read from a file, as the folder of a model has it.
#[derive(Clone, Debug, PartialEq)]
pub struct PublishedTokenizer {
    /// The file that was read.
    pub path: PathBuf,
    /// The name of such a file in a model's folder, by which Transformers finds it.
    pub name: &'static str,
    /// Entries for `tokenizer_config.json` in this folder. They say what the name of the file or
    /// the `config.json` next to it said, which another folder does not have.
    pub config: Map<String, Value>,
}

impl HfTokenizer {
    /// The name and the settings of the tokenizer in a model's folder.
    pub(super) fn as_published(&self) -> Result<PublishedTokenizer, DataError> {
        let read = |name: &str| read_json(&self.path.with_file_name(name));
        let (said, model) = (read("tokenizer_config.json")?, read("config.json")?);
        let names_class = said["tokenizer_class"].is_string();
        let is_plain = !names_class && !model["model_type"].is_string();
        // T5's class would add a second set of sentinels.
        let has_sentinels = || self.plain.encoder.token_to_id("<extra_id_0>").is_some();
        let (name, class) = match self.kind {
            FileKind::Json => ("tokenizer.json", is_plain.then_some(AS_IT_IS)),
            FileKind::SentencePiece => (
                "tokenizer.model",
                (is_plain && has_sentinels()).then_some(AS_IT_IS),
            ),
            FileKind::T5 => ("spiece.model", Some("T5Tokenizer")),
            FileKind::Tiktoken => ("tiktoken.model", None),
            FileKind::WordPiece => ("vocab.txt", Some("BertTokenizer")),
        };
        let mut config = Map::new();
        if let (false, Some(class)) = (names_class, class) {
            config.insert("tokenizer_class".into(), class.into());
        }
        let more = "additional_special_tokens";
        if self.kind == FileKind::WordPiece && said[more].is_null() {
            let added = self.plain.encoder.get_added_tokens_decoder().into_iter();
            let of_t5 = added.filter(|(_, token)| is_of_t5(&token.content));
            let by_id: BTreeMap<u32, String> =
                of_t5.map(|(id, token)| (id, token.content)).collect();
            let tokens: Vec<String> = by_id.into_values().collect();
            if !tokens.is_empty() {
                config.insert(more.into(), tokens.into());
            }
        }
        if let Some(encoding) = self.encoding {
            config.insert("tiktoken_encoding".into(), encoding.into());
        }
        Ok(PublishedTokenizer {
            path: self.path.clone(),
            name,
            config,
        })
    }
}
