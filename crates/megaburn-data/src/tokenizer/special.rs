//! Finds the tokens that end, start and pad a text. Most files of tokenizers do not name them, but
//! the files next to them do.

use std::{fs, io::ErrorKind, path::Path};

use super::encoder::Encoder;
use crate::error::DataError;
use serde_json::Value;

/// Files that name special tokens, as `"eos_token": "</s>"` or `{"content": "</s>"}`.
const NAMES: [&str; 2] = ["tokenizer_config.json", "special_tokens_map.json"];
/// Files that give the ids of special tokens, as `"eos_token_id": 2` or a list, whose first id is
/// taken.
const IDS: [&str; 2] = ["generation_config.json", "config.json"];
/// Usual names of the token that ends a text, for models whose files do not name it.
const WELL_KNOWN_EOS: [&str; 8] = [
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eos|>",
    "[EOS]",
];

/// The special tokens that training and generation need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SpecialIds {
    pub(super) eos: u32,
    pub(super) bos: Option<u32>,
    pub(super) pad: Option<u32>,
}

/// The special tokens that the file of a tokenizer names.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct OwnIds {
    pub(super) eos: Option<u32>,
    pub(super) bos: Option<u32>,
    pub(super) pad: Option<u32>,
}

impl SpecialIds {
    /// The special tokens of the tokenizer that was read from `path`: those that the files next to
    /// it name, else `own`, which the file itself names, else for the end one with a usual name.
    pub(super) fn find(path: &Path, tokenizer: &Encoder, own: OwnIds) -> Result<Self, DataError> {
        let files = Files::read(path.parent().unwrap_or(Path::new("")))?;
        let well_known = || {
            let added = tokenizer.get_added_vocabulary();
            WELL_KNOWN_EOS
                .iter()
                .find_map(|name| added.get_vocab().get(*name).copied())
        };
        let Some(eos) = files.id("eos", tokenizer).or(own.eos).or_else(well_known) else {
            return Err(DataError::NoEos {
                path: path.into(),
                looked: files.looked("eos"),
            });
        };
        Ok(Self {
            eos,
            bos: files.id("bos", tokenizer).or(own.bos),
            pad: files.id("pad", tokenizer).or(own.pad),
        })
    }
}

/// The files next to a tokenizer, first [`NAMES`], then [`IDS`]; `null` for a file that does not
/// exist.
struct Files([(&'static str, Value); 4]);

impl Files {
    fn read(folder: &Path) -> Result<Self, DataError> {
        let [a, b] = NAMES;
        let [c, d] = IDS;
        let mut files = [a, b, c, d].map(|name| (name, Value::Null));
        for (name, value) in &mut files {
            *value = read_json(&folder.join(*name))?;
        }
        Ok(Self(files))
    }

    /// The id of a kind of token, from the first file that names a token of the vocabulary.
    fn id(&self, kind: &str, tokenizer: &Encoder) -> Option<u32> {
        let (named, numbered) = self.0.split_at(NAMES.len());
        let names = named.iter().filter_map(|(_, file)| name(file, kind));
        let ids = numbered.iter().filter_map(|(_, file)| number(file, kind));
        names
            .filter_map(|name| tokenizer.token_to_id(name))
            .chain(ids.filter(|&id| tokenizer.id_to_token(id).is_some()))
            .next()
    }

    /// What each file says about a kind of token, for error messages.
    fn looked(&self, kind: &str) -> String {
        let says = |(file, value): &(&str, Value)| {
            let what = match (value, name(value, kind), number(value, kind)) {
                (Value::Null, ..) => "does not exist".to_string(),
                (_, Some(name), _) if NAMES.contains(file) => {
                    format!("names {name:?}, which is not a token")
                }
                (_, _, Some(id)) if IDS.contains(file) => format!(
                    "gives {id}, which is not a \
                    token"
                ),
                _ => "names no token".into(),
            };
            format!("{file} {what}")
        };
        let files = self.0.iter().map(says).collect::<Vec<_>>().join(", ");
        format!(
            "{files}, and no added token has a usual name like {:?}",
            WELL_KNOWN_EOS[0]
        )
    }
}

/// The content of a JSON file; `null` if it does not exist.
pub(super) fn read_json(path: &Path) -> Result<Value, DataError> {
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Value::Null),
        Err(source) => {
            let path = path.into();
            return Err(DataError::Io { path, source });
        }
    };
    serde_json::from_slice(&text).map_err(|error| DataError::BadTokenizer {
        path: path.into(),
        why: format!("not valid JSON ({error})"),
    })
}

fn name<'a>(file: &'a Value, kind: &str) -> Option<&'a str> {
    let token = file.get(format!("{kind}_token"))?;
    token.as_str().or_else(|| token.get("content")?.as_str())
}

fn number(file: &Value, kind: &str) -> Option<u32> {
    let id = file.get(format!("{kind}_token_id"))?;
    id.as_u64()
        .or_else(|| id.get(0)?.as_u64())
        .and_then(|id| u32::try_from(id).ok())
}
