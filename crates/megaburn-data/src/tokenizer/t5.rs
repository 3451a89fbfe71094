//! What the class `T5Tokenizer` of Transformers makes of a SentencePiece model.

use std::path::Path;

use serde_json::Value;
use tokenizers::AddedToken;

use super::{
    beside::{Added, bad},
    classes::{Class, Resolved, resolve},
    special::read_json,
};
use crate::error::DataError;

const CONFIG: &str = "tokenizer_config.json";
/// The sentinels of the class if `extra_ids` is not given.
const USUAL_EXTRA_IDS: u64 = 100;
/// A vocabulary cannot have more sentinels; a greater number is a mistake.
const MOST_EXTRA_IDS: u64 = 1 << 20;

/// Whether the files next to a SentencePiece model make it a tokenizer of T5: they name its class
/// or a model with this class, or if they name neither, `tokenizer_config.json` has `extra_ids` or
/// `added` has sentinels, which only this class has.
pub(super) fn is_t5(path: &Path, added: &[Added]) -> Result<bool, DataError> {
    let read = |name: &str| read_json(&path.with_file_name(name));
    let (config, model) = (read(CONFIG)?, read("config.json")?);
    let names_class = [&config, &model]
        .iter()
        .any(|file| file["tokenizer_class"].is_string());
    if names_class || model["model_type"].is_string() {
        return Ok(resolve(&config, &model, false) == Resolved::Class(Class::T5));
    }
    let is_sentinel = |added: &Added| added.token.content.starts_with("<extra_id_");
    Ok(config["extra_ids"].is_u64() || added.iter().any(is_sentinel))
}

/// Gives the sentinels `<extra_id_0>`, `<extra_id_1>` and so on the ids after the `num_pieces`
/// pieces of the model, from the last sentinel to the first. A sentinel that a file gives an id
/// keeps it.
///
/// Source: transformers `convert_slow_tokenizer.py`, `T5Converter.convert_from_spm`.
pub(super) fn add_sentinels(
    path: &Path,
    num_pieces: usize,
    added: &mut Vec<Added>,
) -> Result<(), DataError> {
    let config = read_json(&path.with_file_name(CONFIG))?;
    let count = match &config["extra_ids"] {
        Value::Null => Some(USUAL_EXTRA_IDS),
        count => count.as_u64().filter(|count| *count <= MOST_EXTRA_IDS),
    };
    let Some(count) = count else {
        let why = format!(
            "its extra_ids is {}; give the number of sentinels, such as {USUAL_EXTRA_IDS}",
            config["extra_ids"]
        );
        return Err(bad(path, CONFIG, why));
    };
    for (id, number) in (num_pieces..).zip((0..count).rev()) {
        let spelling = format!("<extra_id_{number}>");
        let id = u32::try_from(id).ok();
        match added
            .iter_mut()
            .find(|added| added.token.content == spelling)
        {
            Some(known) => known.id = known.id.or(id),
            None => added.push(Added {
                id,
                token: AddedToken::from(spelling, true),
                file: CONFIG,
            }),
        }
    }
    // Tokens without ids follow those with ids.
    added.sort_by_key(|added| (added.id.is_none(), added.id));
    Ok(())
}
