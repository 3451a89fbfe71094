//! The configuration of a model whose checkpoint does not hold it.

use std::{collections::BTreeMap, fs, io::ErrorKind, path::Path};

use megaburn_torch::dcp::DcpDir;
use serde_json::{Map, Value, json};

use crate::{error::ModelError, families::Family};

/// The keys that a `config.json` has to have, because tensors do not tell them.
const REQUIRED: [&str; 5] = [
    "num_attention_heads",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
];

/// Sizes that the order of rows depends on.
pub(super) struct Sizes {
    pub(super) head_dim: usize,
}

/// Reads the `config.json` of a folder and adds the keys that the tensors tell.
///
/// # Errors
/// The file is missing, invalid, lacks a key, or contradicts the tensors.
pub(super) fn complete(
    folder: &Path,
    dir: &DcpDir,
    tensors: &BTreeMap<String, String>,
) -> Result<(Value, Sizes), ModelError> {
    let path = folder.join("config.json");
    let keys = read(&path)?;
    let completed = completed(
        keys,
        |name| {
            let shape = dir.tensor(tensors.get(name)?).ok()?.shape();
            Some(shape.to_vec())
        },
        tensors,
    );
    completed.map_err(|why| ModelError::File { path, why })
}

/// The keys of the file; none if there is no file.
fn read(path: &Path) -> Result<Map<String, Value>, ModelError> {
    let fail = |why: String| ModelError::File {
        path: path.to_path_buf(),
        why,
    };
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Map::new()),
        Err(error) => return Err(fail(error.to_string())),
    };
    match serde_json::from_slice(&text) {
        Ok(Value::Object(keys)) => Ok(keys),
        Ok(_) => Err(fail("is not a JSON object".into())),
        Err(error) => Err(fail(error.to_string())),
    }
}

fn completed(
    mut keys: Map<String, Value>,
    shape: impl Fn(&str) -> Option<Vec<usize>>,
    tensors: &BTreeMap<String, String>,
) -> Result<(Value, Sizes), String> {
    check_required(&keys)?;
    let family = Family::LLAMA.definition();
    let matrix = |name: &str| match shape(name).as_deref() {
        Some([rows, columns]) => Ok((*rows, *columns)),
        Some(shape) => Err(format!(
            "`{name}` should be a matrix, but the checkpoint has {shape:?}"
        )),
        None => Err(format!(
            "the checkpoint has no `{name}` in the names of Hugging Face: it is no complete model"
        )),
    };
    let (vocab, hidden) = matrix("model.embed_tokens.weight")?;
    let (query, _) = matrix("model.layers.0.self_attn.q_proj.weight")?;
    let (key, _) = matrix("model.layers.0.self_attn.k_proj.weight")?;
    let (ffn, _) = matrix("model.layers.0.mlp.gate_proj.weight")?;
    let heads = keys["num_attention_heads"]
        .as_u64()
        .and_then(|heads| usize::try_from(heads).ok());
    let head_dim =
        heads.and_then(|heads| query.checked_div(heads).filter(|dim| dim * heads == query));
    let head_dim = head_dim.filter(|dim| *dim > 0 && dim.is_multiple_of(2));
    let head_dim = head_dim.ok_or_else(|| {
        format!(
            "`num_attention_heads` is {}, but wq has {query} rows, which are to be heads of an even \
            size",
            keys["num_attention_heads"]
        )
    })?;
    if !key.is_multiple_of(head_dim) {
        return Err(format!(
            "wk has {key} rows, which are no heads of {head_dim} as those of wq"
        ));
    }
    let number = |name: &String| {
        name.strip_prefix("model.layers.")?
            .split('.')
            .next()?
            .parse()
            .ok()
    };
    let last: Option<usize> = tensors.keys().filter_map(number).max();
    let mut told = vec![
        ("architectures", json!([family.architecture()])),
        ("model_type", json!(family.model_type())),
        ("vocab_size", json!(vocab)),
        ("hidden_size", json!(hidden)),
        ("intermediate_size", json!(ffn)),
        (
            "num_hidden_layers",
            json!(last.map_or(0, |last| last.saturating_add(1))),
        ),
        ("num_key_value_heads", json!(key / head_dim)),
        ("head_dim", json!(head_dim)),
    ];
    if !tensors.contains_key("lm_head.weight") {
        told.push(("tie_word_embeddings", json!(true)));
    }
    for (key, value) in told {
        match keys.get(key) {
            None | Some(Value::Null) => {
                keys.insert(key.to_string(), value);
            }
            Some(said) if *said == value => {}
            Some(said) => {
                return Err(format!(
                    "`{key}` is {said}, but by the tensors of the checkpoint it is {value}"
                ));
            }
        }
    }
    Ok((Value::Object(keys), Sizes { head_dim }))
}

/// Refuses a file that lacks what the tensors do not tell, with all that is missing.
fn check_required(keys: &Map<String, Value>) -> Result<(), String> {
    let rope = keys.get("rope_parameters").filter(|rope| rope.is_object());
    let has = |key: &str| match key {
        // Without scaling it is null, which has to be said: versions of torchtitan differ.
        "rope_scaling" => rope.is_some() || keys.contains_key(key),
        "rope_theta" if rope.is_some_and(|rope| rope.get(key).is_some()) => true,
        _ => keys.get(key).is_some_and(|value| !value.is_null()),
    };
    let missing: Vec<String> = REQUIRED
        .into_iter()
        .filter(|key| !has(key))
        .map(|key| format!("`{key}`"))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(format!(
        "{} missing, and a checkpoint of torchtitan does not hold them: write them into this file, \
        as the model was trained (`rope_scaling` is null without scaling)",
        match missing.as_slice() {
            [one] => format!("{one} is"),
            all => format!("{} are", all.join(", ")),
        }
    ))
}
