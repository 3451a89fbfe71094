//! What the files next to a tokenizer add to it: tokens, and special tokens around a prompt.

use std::path::Path;

use serde_json::{Value, json};
use tokenizers::{AddedToken, PostProcessorWrapper};

use super::{
    encoder::Encoder,
    special::{SpecialIds, read_json},
    vocabulary::Vocabulary,
};
use crate::error::DataError;

const CONFIG: &str = "tokenizer_config.json";
const NAMES: &str = "special_tokens_map.json";
const ADDED: &str = "added_tokens.json";
/// Keys that name special tokens.
pub(super) const NAMED: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];
/// Keys of lists of special tokens.
const MORE: [&str; 2] = ["additional_special_tokens", "extra_special_tokens"];
/// A vocabulary cannot have more ids; a greater one is a mistake.
const MOST_IDS: u32 = 1 << 24;

/// A token that a file adds.
#[derive(Clone, Debug)]
pub(super) struct Added {
    /// The id, if the file gives one.
    pub(super) id: Option<u32>,
    pub(super) token: AddedToken,
    /// The file that adds it.
    pub(super) file: &'static str,
}

/// The tokens that the files next to `path` add: those with ids in the order of their ids, then
/// those that are only named.
pub(super) fn added_tokens(path: &Path) -> Result<Vec<Added>, DataError> {
    let read = |name: &'static str| read_json(&path.with_file_name(name));
    let (config, names, words) = (read(CONFIG)?, read(NAMES)?, read(ADDED)?);
    let mut added = Vec::new();
    let by_id = config["added_tokens_decoder"].as_object();
    for (id, value) in by_id.into_iter().flatten() {
        let is_special = value["special"].as_bool().unwrap_or(false);
        let token = token(value, is_special);
        let id = id.parse().ok().filter(|&id| id < MOST_IDS);
        let (Some(token), Some(id)) = (token, id) else {
            return Err(bad(
                path,
                CONFIG,
                format!("added_tokens_decoder has no token with an id in {value}"),
            ));
        };
        added.push(Added {
            id: Some(id),
            token,
            file: CONFIG,
        });
    }
    for (word, id) in words.as_object().into_iter().flatten() {
        let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
        let Some(id) = id.filter(|&id| id < MOST_IDS) else {
            return Err(bad(path, ADDED, format!("{word:?} has no id")));
        };
        if !added.iter().any(|added| added.token.content == *word) {
            added.push(Added {
                id: Some(id),
                token: AddedToken::from(word.as_str(), false),
                file: ADDED,
            });
        }
    }
    added.sort_by_key(|added| added.id);
    for (file, values) in [(CONFIG, &config), (NAMES, &names)] {
        let named = NAMED.iter().map(|name| &values[*name]);
        let more = MORE.iter().filter_map(|name| values[*name].as_array());
        for value in named.chain(more.flatten()) {
            let Some(token) = token(value, true) else {
                continue;
            };
            match added
                .iter_mut()
                .find(|added| added.token.content == token.content)
            {
                Some(known) => known.token.special = true,
                None => added.push(Added {
                    id: None,
                    token,
                    file,
                }),
            }
        }
    }
    Ok(added)
}

/// Adds the tokens with their ids to the vocabulary.
pub(super) fn add_ids(
    path: &Path,
    vocabulary: &mut Vocabulary,
    added: &[Added],
) -> Result<(), DataError> {
    for Added { id, token, file } in added {
        let Some(id) = *id else { continue };
        if vocabulary.id(&token.content) != Some(id) && !vocabulary.insert(&token.content, id) {
            return Err(DataError::BadTokenizer {
                path: path.with_file_name(file),
                why: format!(
                    "it gives {:?} the id {id}, but the tokenizer gives this token or this id \
                    otherwise",
                    token.content
                ),
            });
        }
    }
    Ok(())
}

/// Adds the special tokens around a prompt that `add_bos_token` and `add_eos_token` of
/// `tokenizer_config.json` ask for, and the eos token if `ends_prompts`.
pub(super) fn set_template(
    path: &Path,
    encoder: &mut Encoder,
    special: &SpecialIds,
    ends_prompts: bool,
) -> Result<(), DataError> {
    let config = read_json(&path.with_file_name(CONFIG))?;
    let asked = |key: &str| config[key] == true;
    let bos = asked("add_bos_token").then_some(special.bos);
    if bos == Some(None) {
        let why = "it sets add_bos_token, but no file names a bos_token; add it, like \"bos_token\": \"<s>\"";
        return Err(bad(path, CONFIG, why.into()));
    }
    let before: Vec<u32> = bos.flatten().into_iter().collect();
    let after: Vec<u32> = (ends_prompts || asked("add_eos_token"))
        .then_some(special.eos)
        .into_iter()
        .collect();
    with_template(path, encoder, &before, &after)
}

/// Puts tokens before and after each prompt.
pub(super) fn with_template(
    path: &Path,
    encoder: &mut Encoder,
    before: &[u32],
    after: &[u32],
) -> Result<(), DataError> {
    if before.is_empty() && after.is_empty() {
        return Ok(());
    }
    let name = |id: &u32| encoder.id_to_token(*id).unwrap_or_default();
    let piece = |id: &u32| json!({"SpecialToken": {"id": name(id), "type_id": 0}});
    let text = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
    let single: Vec<Value> = before
        .iter()
        .map(piece)
        .chain([text("A")])
        .chain(after.iter().map(piece))
        .collect();
    let ids = before.iter().chain(after);
    let tokens = ids.map(|id| {
        (
            name(id),
            json!({"id": name(id), "ids": [id], "tokens": [name(id)]}),
        )
    });
    let template = json!({
        "type": "TemplateProcessing",
        "single": single,
        "pair": [text("A"), text("B")],
        "special_tokens": Value::Object(tokens.collect()),
    });
    let template: PostProcessorWrapper = serde_json::from_value(template).map_err(|error| {
        bad(
            path,
            CONFIG,
            format!("its special tokens cannot be added ({error})"),
        )
    })?;
    encoder.with_post_processor(Some(template));
    Ok(())
}

/// The added tokens and the tokens around a prompt, which the file of a tokenizer does not say.
/// Tokens that only prompts have, as `is_of_prompts` says, are left out, because a training text is
/// the same without them.
pub(super) fn describe(encoder: &Encoder, is_of_prompts: impl Fn(&str) -> bool) -> String {
    let added = encoder.get_added_tokens_decoder().into_iter();
    let mut added: Vec<_> = added
        .filter(|(_, token)| !is_of_prompts(&token.content))
        .collect();
    added.sort_by_key(|(id, _)| *id);
    format!("{added:?} {}", json!(encoder.get_post_processor()))
}

/// A token, which is a string or an object.
fn token(value: &Value, is_special: bool) -> Option<AddedToken> {
    let content = value.as_str().or_else(|| value["content"].as_str())?;
    let flag = |name: &str| value.get(name).and_then(Value::as_bool);
    let mut token = AddedToken::from(content, is_special);
    token.lstrip = flag("lstrip").unwrap_or(false);
    token.rstrip = flag("rstrip").unwrap_or(false);
    token.single_word = flag("single_word").unwrap_or(false);
    token.normalized = flag("normalized").unwrap_or(token.normalized);
    (!content.is_empty()).then_some(token)
}

/// The error for a file next to the tokenizer at `path`.
pub(super) fn bad(path: &Path, file: &str, why: String) -> DataError {
    DataError::BadTokenizer {
        path: path.with_file_name(file),
        why,
    }
}
