//! Finds what `transformers`, and with it Megatron-LM, would encode otherwise than `tokenizer.json`
//! says.
//!
//! `AutoTokenizer` reads `tokenizer.json` and then changes it: by the class that the files next to
//! it name, and by their added tokens, special tokens and switches. The changes are not made here,
//! so a tokenizer that has some is refused.

use std::{collections::HashMap, path::Path};

use serde_json::Value;
use tokenizers::AddedToken;

use super::{encoder::Encoder, special::read_json};
use crate::error::DataError;

/// The classes that take `tokenizer.json` as it is.
const PLAIN_CLASSES: [&str; 2] = ["PreTrainedTokenizerFast", "TokenizersBackend"];
const PLAIN_CLASS_REMEDY: &str = "write \"tokenizer_class\": \"PreTrainedTokenizerFast\" into its tokenizer_config.json, with \
    which they take tokenizer.json as it is";
const SAVE_REMEDY: &str = "write a tokenizer.json with it by Python's `AutoTokenizer.from_pretrained(DIR)\
    .save_pretrained(DIR)`";
const SWITCH_REMEDY: &str = "make both files say the same";
/// Special tokens that are added to the vocabulary if `tokenizer.json` has not added them.
const NAMED: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];
/// Lists of more such tokens, and objects whose values are such tokens.
const MORE: [&str; 3] = [
    "additional_special_tokens",
    "extra_special_tokens",
    "model_specific_special_tokens",
];

/// What differs, and its remedy.
type Difference = (String, &'static str);

/// Checks the files next to the tokenizer `path`. `template` are the special tokens before and
/// after a text.
pub(super) fn check(
    path: &Path,
    tokenizer: &Encoder,
    template: &Option<[Vec<u32>; 2]>,
) -> Result<(), DataError> {
    let folder = path.parent().unwrap_or(Path::new(""));
    let config = read_json(&folder.join("tokenizer_config.json"))?;
    let names = read_json(&folder.join("special_tokens_map.json"))?;
    let added = read_json(&folder.join("added_tokens.json"))?;
    let model = read_json(&folder.join("config.json"))?;
    let known: HashMap<String, AddedToken> = tokenizer
        .get_added_tokens_decoder()
        .into_values()
        .map(|token| (token.content.clone(), token))
        .collect();
    let found = class(&config, &model)
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

fn class(config: &Value, model: &Value) -> Option<Difference> {
    let named = [(config, "tokenizer_config.json"), (model, "config.json")];
    let named = named
        .iter()
        .find_map(|(file, name)| Some((file["tokenizer_class"].as_str()?, name)));
    match (named, model["model_type"].as_str()) {
        (Some((class, _)), _) if PLAIN_CLASSES.contains(&class) => None,
        (Some((class, file)), _) => Some((
            format!("{file} names the class {class}, which may change it"),
            PLAIN_CLASS_REMEDY,
        )),
        (None, Some(model)) => Some((
            format!(
                "config.json names the model `{model}`, whose class of tokenizer may change it"
            ),
            PLAIN_CLASS_REMEDY,
        )),
        (None, None) => None,
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
    let said = [("add_bos_token", adds(0)), ("add_eos_token", adds(1))];
    said.into_iter().find_map(|(name, adds)| {
        let said = config[name].as_bool()?;
        (Some(said) != adds).then(|| {
            let why =
                format!("tokenizer_config.json sets {name} to {said}, unlike its post_processor");
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
