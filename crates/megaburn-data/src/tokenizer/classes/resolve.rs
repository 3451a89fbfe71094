use serde_json::Value;

use super::{CLASSES, Class};

/// The class that reads a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) enum Resolved {
    /// One that takes `tokenizer.json` as it is.
    AsItIs,
    Class(Class),
    /// One that is not known here, as a file says.
    Unknown(String),
}

/// The classes that take `tokenizer.json` as it is, without the ending `Fast`.
const AS_IT_IS: [&str; 2] = ["PreTrainedTokenizer", "TokenizersBackend"];
/// The class of a `model_type`, if there is one of its own.
const MODELS: [(&str, Option<Class>); 17] = [
    ("bert", Some(Class::Bert)),
    ("deepseek_v2", None),
    ("deepseek_v3", None),
    ("gemma", Some(Class::Gemma)),
    ("gemma2", Some(Class::Gemma)),
    ("gemma3", Some(Class::Gemma)),
    ("gemma3_text", Some(Class::Gemma)),
    ("gpt2", Some(Class::Gpt2)),
    ("llama", None),
    ("mistral", None),
    ("mixtral", None),
    ("mt5", Some(Class::T5)),
    ("qwen2", Some(Class::Qwen2)),
    ("qwen2_moe", Some(Class::Qwen2)),
    ("qwen3", Some(Class::Qwen2)),
    ("qwen3_moe", Some(Class::Qwen2)),
    ("t5", Some(Class::T5)),
];
/// Models whose tokenizers are read as they are, whatever class of [`CLASSES`] a file names.
const ALWAYS_AS_IT_IS: [&str; 2] = ["mistral", "mixtral"];
/// Models whose own class is taken, whatever class a file names.
const ALWAYS_OWN: [&str; 1] = ["qwen2"];

/// The class for `tokenizer_config.json` and `config.json`. `is_byte_level` says whether
/// `tokenizer.json` has a part of this type.
pub(in super::super) fn resolve(config: &Value, model: &Value, is_byte_level: bool) -> Resolved {
    let files = [(config, "tokenizer_config.json"), (model, "config.json")];
    let mut named = files
        .iter()
        .filter_map(|(file, name)| Some((file["tokenizer_class"].as_str()?, name)));
    let named = named.next();
    if !config["auto_map"]["AutoTokenizer"].is_null() || config["auto_map"].is_array() {
        return Resolved::Unknown(
            "tokenizer_config.json names a class of its own code (auto_map)".into(),
        );
    }
    let model = model["model_type"]
        .as_str()
        .filter(|model| !model.is_empty());
    let own = match model {
        Some(model) => match MODELS.iter().find(|(name, _)| *name == model) {
            Some((_, own)) => *own,
            None if named.is_some_and(|(class, _)| is_as_it_is(class)) => return Resolved::AsItIs,
            None => {
                return Resolved::Unknown(format!(
                    "config.json names the model `{model}`, whose class of tokenizer may change it"
                ));
            }
        },
        None => None,
    };
    let is_of = |models: &[&str]| model.is_some_and(|model| models.contains(&model));
    let Some((class, file)) = named.filter(|_| !is_of(&ALWAYS_OWN)) else {
        return own.map_or(Resolved::AsItIs, Resolved::Class);
    };
    if is_as_it_is(class) {
        return Resolved::AsItIs;
    }
    let stem = class.strip_suffix("Fast").unwrap_or(class);
    match CLASSES.iter().find(|(name, _)| *name == stem) {
        Some((_, Class::Llama)) if is_byte_level => Resolved::AsItIs,
        Some(_) if is_of(&ALWAYS_AS_IT_IS) => Resolved::AsItIs,
        Some((_, class)) => Resolved::Class(*class),
        None => Resolved::Unknown(format!(
            "{file} names the class {class}, which may change it"
        )),
    }
}

fn is_as_it_is(class: &str) -> bool {
    AS_IT_IS.contains(&class.strip_suffix("Fast").unwrap_or(class))
}
