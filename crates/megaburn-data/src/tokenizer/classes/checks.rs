use serde::Deserialize;
use serde_json::Value;
use tokenizers::{Model, ModelWrapper, pre_tokenizers::byte_level::ByteLevel};

use super::{
    super::encoder::{Encoder, EncoderModel},
    Class,
};

impl Class {
    /// The special tokens that the class names if no file does, by their keys.
    fn tokens(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Bert => &[
                ("unk_token", "[UNK]"),
                ("sep_token", "[SEP]"),
                ("pad_token", "[PAD]"),
                ("cls_token", "[CLS]"),
                ("mask_token", "[MASK]"),
            ],
            Self::Gemma => &[
                ("unk_token", "<unk>"),
                ("bos_token", "<bos>"),
                ("eos_token", "<eos>"),
                ("pad_token", "<pad>"),
                ("mask_token", "<mask>"),
            ],
            Self::Gpt2 => &[
                ("unk_token", "<|endoftext|>"),
                ("bos_token", "<|endoftext|>"),
                ("eos_token", "<|endoftext|>"),
            ],
            Self::Llama => &[
                ("unk_token", "<unk>"),
                ("bos_token", "<s>"),
                ("eos_token", "</s>"),
            ],
            Self::Qwen2 => &[
                ("unk_token", "<|endoftext|>"),
                ("eos_token", "<|endoftext|>"),
                ("pad_token", "<|endoftext|>"),
            ],
            Self::T5 => &[
                ("unk_token", "<unk>"),
                ("eos_token", "</s>"),
                ("pad_token", "<pad>"),
            ],
        }
    }

    /// Checks that all special tokens of the class are added tokens of the file.
    pub(super) fn check_tokens(self, encoder: &Encoder, files: [&Value; 2]) -> Result<(), String> {
        let added = encoder.get_added_tokens_decoder();
        let known = |token: &str| added.values().find(|added| added.content == token);
        let name = self.name();
        for (key, usual) in self.tokens() {
            let Some(token) = said(files, key, usual) else {
                continue;
            };
            let Some(token) = known(token) else {
                return Err(format!(
                    "the class {name} adds its {key} {token:?}, which is no added token of it"
                ));
            };
            if self == Self::Qwen2
                && (token.lstrip || token.rstrip || token.single_word || token.normalized)
            {
                return Err(format!(
                    "the class {name} finds its {key} {:?} also next to letters and spaces",
                    token.content
                ));
            }
        }
        let num_extra = files[0]["extra_ids"].as_u64().unwrap_or(100);
        let mut extra = (0..num_extra).map(|id| format!("<extra_id_{id}>"));
        match extra.find(|token| self == Self::T5 && known(token).is_none()) {
            Some(token) => Err(format!(
                "the class {name} adds {token}, which is no added token of it; see extra_ids"
            )),
            None => Ok(()),
        }
    }

    /// Checks that the model is of the type of the class, and never has unknown parts for which
    /// classes differ.
    pub(super) fn check_model(
        self,
        encoder: &Encoder,
        bytes: &[u8],
        files: [&Value; 2],
    ) -> Result<(), String> {
        let name = self.name();
        let has = |token: String| encoder.get_model().token_to_id(&token).is_some();
        match (self, encoder.get_model()) {
            (Self::Bert, EncoderModel::Library(ModelWrapper::WordPiece(model))) => {
                let unknown = said(files, "unk_token", "[UNK]");
                let is_usual = model.continuing_subword_prefix == "##"
                    && model.max_input_chars_per_word == 100;
                if is_usual && Some(model.unk_token.as_str()) == unknown {
                    return self.check_template(
                        encoder,
                        files,
                        Some(("cls_token", "[CLS]")),
                        ("sep_token", "[SEP]"),
                    );
                }
                Err(format!(
                    "the class {name} has another prefix, length of words or unknown token than it"
                ))
            }
            (Self::T5, EncoderModel::Library(ModelWrapper::Unigram(_))) => {
                let file: Result<UnigramFile, _> = serde_json::from_slice(bytes);
                let usual = file.is_ok_and(|file| {
                    file.model.unk_id == Some(2) && file.model.byte_fallback != Some(true)
                });
                if !usual {
                    return Err(format!(
                        "the class {name} has the unknown token 2 and no byte fallback, unlike it"
                    ));
                }
                self.check_template(encoder, files, None, ("eos_token", "</s>"))
            }
            (Self::Bert | Self::T5, _) => Err(format!(
                "the class {name} has another type of model than it"
            )),
            (_, EncoderModel::Library(ModelWrapper::BPE(model))) => {
                let affixes = [&model.continuing_subword_prefix, &model.end_of_word_suffix];
                if affixes.into_iter().flatten().any(|affix| !affix.is_empty()) {
                    return Err(format!(
                        "the class {name} has no prefix or suffix in words, unlike it"
                    ));
                }
                let mut alphabet = ByteLevel::alphabet().into_iter();
                let is_complete = match self.has_byte_fallback() {
                    true => (0..=255).all(|byte: u8| has(format!("<0x{byte:02X}>"))),
                    false => alphabet.all(|char| has(char.into())),
                };
                match is_complete {
                    true => Ok(()),
                    false => Err(format!(
                        "the class {name} needs tokens for all 256 bytes, which it has not"
                    )),
                }
            }
            _ => Err(format!(
                "the class {name} has another type of model than it"
            )),
        }
    }

    /// Checks that the post-processor adds the tokens that the class always adds.
    fn check_template(
        self,
        encoder: &Encoder,
        files: [&Value; 2],
        before: Option<(&str, &'static str)>,
        after: (&str, &'static str),
    ) -> Result<(), String> {
        let ids = |name: Option<(&str, &'static str)>| {
            let name = name.and_then(|(key, usual)| said(files, key, usual));
            name.and_then(|name| encoder.token_to_id(name))
        };
        let expected: Vec<u32> = ids(before).into_iter().chain(ids(Some(after))).collect();
        let found = encoder
            .encode_fast("", true)
            .map(|encoding| encoding.get_ids().to_vec());
        match found {
            Ok(found) if found == expected => Ok(()),
            _ => Err(format!(
                "the class {} adds other tokens to a prompt than its post_processor",
                self.name()
            )),
        }
    }
}

/// The fields of a `tokenizer.json` with a unigram model that are not public in the model.
#[derive(Deserialize)]
struct UnigramFile {
    model: UnigramModel,
}

#[derive(Deserialize)]
struct UnigramModel {
    unk_id: Option<u64>,
    byte_fallback: Option<bool>,
}

/// The token that the files name for `key`, else the usual one; `None` if a file says `null`.
fn said<'a>(files: [&'a Value; 2], key: &str, usual: &'a str) -> Option<&'a str> {
    let said = files.into_iter().find_map(|file| file.get(key));
    match said {
        Some(Value::Null) => None,
        Some(token) => token.as_str().or_else(|| token["content"].as_str()),
        None => Some(usual),
    }
}
