//! What `transformers`, and with it Megatron-LM, encodes otherwise than `tokenizer.json` says.
//!
//! `AutoTokenizer` reads `tokenizer.json` and then changes it: by the class that the files next to
//! it name, and by their added tokens, special tokens and switches. The changes of the common
//! classes are made for prompts ([`super::classes`]); a tokenizer with other changes is refused.

use std::{collections::HashMap, path::Path};

use serde_json::Value;
use tokenizers::AddedToken;

use super::{
    beside::NAMED,
    classes::{Resolved, resolve},
    encoder::Encoder,
    special::read_json,
};
use crate::error::DataError;

const PLAIN_CLASS_REMEDY: &str = "write \"tokenizer_class\": \"PreTrainedTokenizerFast\" into its tokenizer_config.json, with \
    which they take tokenizer.json as it is";
const SAVE_REMEDY: &str = "write a tokenizer.json with it by Python's `AutoTokenizer.from_pretrained(DIR)\
    .save_pretrained(DIR)`";
const SWITCH_REMEDY: &str = "make both files say the same";
/// Lists of more such tokens, and objects whose values are such tokens.
const MORE: [&str; 3] = [
    "additional_special_tokens",
    "extra_special_tokens",
    "model_specific_special_tokens",
];

/// How `tokenizer.json` names parts that encode bytes.
const BYTE_LEVEL: &[u8] = b"\"ByteLevel\"";

/// What differs, and its remedy.
type Difference = (String, &'static str);

/// What `transformers` encodes prompts with.
#[derive(Debug)]
pub(super) enum Prompts {
    /// The file as it is.
    AsItIs,
    /// A tokenizer that a class made of the file, and a description of what it changed.
    Changed(Box<Encoder>, String),
    /// A tokenizer that is not known, for this reason.
    Unknown(String),
}

/// Finds what `transformers` encodes prompts with, for the `tokenizer.json` at `path` with the
/// content `bytes`.
pub(super) fn prompts(
    path: &Path,
    bytes: &[u8],
    tokenizer: &Encoder,
) -> Result<Prompts, DataError> {
    let read = |name: &str| read_json(&path.with_file_name(name));
    let (config, names, model) = (
        read("tokenizer_config.json")?,
        read("special_tokens_map.json")?,
        read("config.json")?,
    );
    let mut parts = bytes.windows(BYTE_LEVEL.len());
    let is_byte_level = parts.any(|part| part == BYTE_LEVEL);
    Ok(match resolve(&config, &model, is_byte_level) {
        Resolved::AsItIs => Prompts::AsItIs,
        Resolved::Unknown(why) => Prompts::Unknown(why),
        Resolved::Class(class) => match class.apply(tokenizer, bytes, [&config, &names]) {
            Ok(None) => Prompts::AsItIs,
            Ok(Some((changed, description))) => Prompts::Changed(Box::new(changed), description),
            Err(why) => Prompts::Unknown(why),
        },
    })
}

/// Checks the files next to the tokenizer `path`. `unknown` says why the class of its tokenizer is
/// not known, and `template` are the special tokens before and after a text.
pub(super) fn check(
    path: &Path,
    tokenizer: &Encoder,
    unknown: Option<&str>,
    template: &Option<[Vec<u32>; 2]>,
) -> Result<(), DataError> {
    let folder = path.parent().unwrap_or(Path::new(""));
    let config = read_json(&folder.join("tokenizer_config.json"))?;
    let names = read_json(&folder.join("special_tokens_map.json"))?;
    let added = read_json(&folder.join("added_tokens.json"))?;
    let known: HashMap<String, AddedToken> = tokenizer
        .get_added_tokens_decoder()
        .into_values()
        .map(|token| (token.content.clone(), token))
        .collect();
    let found = unknown
        .map(|why| (why.to_string(), PLAIN_CLASS_REMEDY))
        .or_else(|| added_tokens(&config, tokenizer, &known))
        .or_else(|| special_tokens(&config, &known))
        .or_else(|| special_tokens(&names, &known))
        .or_else(|| added_words(&added, &known))
        .or_else(|| switches(&config, template))
        .or_else(|| prefix_space(&config, tokenizer));
    match found {
        Some((why, remedy)) => Err(DataError::OtherIds {
            path: path.into(),
            why,
            remedy: remedy.into(),
        }),
        None => Ok(()),
    }
}

/// `added_tokens_decoder`: objects by their ids.
fn added_tokens(
    config: &Value,
    tokenizer: &Encoder,
    known: &HashMap<String, AddedToken>,
) -> Option<Difference> {
    let tokens = config["added_tokens_decoder"].as_object()?;
    tokens.iter().find_map(|(id, token)| {
        let content = token["content"].as_str().unwrap_or_default();
        let differs = unlike(token, known).or_else(|| {
            let found = tokenizer.token_to_id(content);
            let is_same = found.is_some_and(|found| found.to_string() == *id);
            (!is_same).then(|| (format!("{content:?} has the id {id} there"), SAVE_REMEDY))
        });
        differs.map(|(why, remedy)| (format!("tokenizer_config.json adds tokens: {why}"), remedy))
    })
}

fn special_tokens(file: &Value, known: &HashMap<String, AddedToken>) -> Option<Difference> {
    let named = NAMED.iter().map(|name| (*name, &file[*name]));
    let more = MORE.iter().flat_map(|name| {
        let values: Vec<&Value> = match &file[*name] {
            Value::Array(values) => values.iter().collect(),
            Value::Object(fields) => fields.values().collect(),
            _ => Vec::new(),
        };
        values.into_iter().map(|value| (*name, value))
    });
    let mut all = named.chain(more).filter(|(_, token)| !token.is_null());
    all.find_map(|(name, token)| {
        let (why, remedy) = unlike(token, known)?;
        Some((format!("the {name} is added to it: {why}"), remedy))
    })
}

/// `added_tokens.json`: ids by their tokens.
fn added_words(file: &Value, known: &HashMap<String, AddedToken>) -> Option<Difference> {
    let mut words = file.as_object()?.keys();
    let word = words.find(|word| !known.contains_key(*word))?;
    let why = format!("added_tokens.json adds {word:?}, which is no added token of tokenizer.json");
    Some((why, SAVE_REMEDY))
}

/// Whether a token, a string or an object, is other than the added token of this spelling.
fn unlike(token: &Value, known: &HashMap<String, AddedToken>) -> Option<Difference> {
    let content = token.as_str().or_else(|| token["content"].as_str());
    let content = content.unwrap_or_default();
    let Some(known) = known.get(content) else {
        let why = format!("{content:?} is no added token of tokenizer.json");
        return Some((why, SAVE_REMEDY));
    };
    let flags = [
        ("lstrip", known.lstrip),
        ("rstrip", known.rstrip),
        ("single_word", known.single_word),
        ("normalized", known.normalized),
    ];
    let differs = |(name, value): &&(&str, bool)| {
        let said = token.get(*name).and_then(Value::as_bool);
        said.is_some_and(|said| said != *value)
    };
    let (name, value) = flags.iter().find(differs)?;
    let why = format!("{content:?} has not {name} {value}, as in tokenizer.json");
    Some((why, SAVE_REMEDY))
}

/// Switches of `tokenizer_config.json` that change texts or the tokens around them.
fn switches(config: &Value, template: &Option<[Vec<u32>; 2]>) -> Option<Difference> {
    for name in ["split_special_tokens", "from_slow"] {
        if config[name] == true {
            let why = format!("tokenizer_config.json sets {name}");
            return Some((why, "remove it there"));
        }
    }
    let adds = |index: usize| template.as_ref().map(|around| !around[index].is_empty());
    let said = ["add_bos_token", "add_eos_token"].map(|name| config[name].as_bool());
    if said == [None, None] {
        return None;
    }
    // Once one of them is given, a missing one is false.
    let all = ["add_bos_token", "add_eos_token"]
        .into_iter()
        .zip(said)
        .zip([adds(0), adds(1)]);
    all.into_iter().find_map(|((name, said), adds)| {
        let value = said.unwrap_or(false);
        (Some(value) != adds).then(|| {
            let says = match said {
                Some(said) => format!("sets {name} to {said}"),
                None => format!("does not set {name} to true, only the other one"),
            };
            let why = format!("tokenizer_config.json {says}, unlike its post_processor");
            (why, SWITCH_REMEDY)
        })
    })
}

/// `add_prefix_space`, which is false if it is not given.
fn prefix_space(config: &Value, tokenizer: &Encoder) -> Option<Difference> {
    let said = config["add_prefix_space"].as_bool();
    let pre_tokenizer = serde_json::to_value(tokenizer.get_pre_tokenizer()).unwrap_or_default();
    let is_byte_level = |part: &&Value| part["type"] == "ByteLevel";
    let whole = Some(&pre_tokenizer).filter(is_byte_level);
    let parts = pre_tokenizer["pretokenizers"].as_array();
    let part = parts.and_then(|parts| parts.iter().find(is_byte_level));
    let adds = whole.or(part)?["add_prefix_space"].as_bool()?;
    let said = said.or(whole.map(|_| false))?;
    (said != adds).then(|| {
        let why = format!(
            "tokenizer_config.json sets add_prefix_space to {said}, its pre_tokenizer to {adds}"
        );
        (why, SWITCH_REMEDY)
    })
}
