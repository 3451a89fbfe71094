//! Checks that the tensors of a Hugging Face folder match its `config.json`.

use std::collections::{BTreeMap, BTreeSet};

use megaburn_checkpoint::{CheckpointError, HfDir, hf::stacked_row};

use super::mtp::{Copied, predicts};
use crate::{decoder::DecoderConfig, error::ModelError, hf::HfParam, warn_once::warn_once};

/// Whether a folder with tied embeddings contains a head that differs from the embedding.
/// Transformers does not tie them in this case.
///
/// # Errors
/// One of the two tensors cannot be read.
pub(super) fn has_own_head(
    dir: &HfDir,
    config: &DecoderConfig,
    params: &[HfParam],
) -> Result<bool, CheckpointError> {
    let head = config.family.head_name();
    let embedding = params.iter().find(|param| param.path == "embedding.weight");
    let embedding = embedding.map(|param| param.parts[0].name.as_str());
    match embedding.filter(|name| dir.header(name).is_some() && dir.header(head).is_some()) {
        Some(embedding) => Ok(!dir.are_equal(head, embedding)?),
        None => Ok(false),
    }
}

/// Whether a folder has all tensors of a binary head, which a model of the family may have. The
/// `config.json` of some published models names an architecture without it.
pub(super) fn has_binary_head(dir: &HfDir, config: &DecoderConfig) -> Result<bool, ModelError> {
    if !config.bidirectional {
        return Ok(false);
    }
    let names = binary_head_names(config)?;
    Ok(names.iter().all(|name| dir.header(name).is_some()))
}

/// The names of the tensors of a binary head, which a model of the family may have.
fn binary_head_names(config: &DecoderConfig) -> Result<BTreeSet<String>, ModelError> {
    let with_head = DecoderConfig {
        binary_head: true,
        ..config.clone()
    };
    let params = with_head.hf_params()?;
    let of_head = params
        .iter()
        .filter(|param| param.path.starts_with("binary_head."));
    let parts = of_head.flat_map(|param| &param.parts);
    Ok(parts.map(|part| part.name.clone()).collect())
}

/// The tensors of a folder that belong to a part of a binary head, such as its pooler, and that the
/// model without such a head leaves out, as Transformers does. A warning names them.
fn parts_of_binary_head(
    dir: &HfDir,
    config: &DecoderConfig,
) -> Result<BTreeSet<String>, ModelError> {
    if !config.bidirectional || config.binary_head {
        return Ok(BTreeSet::new());
    }
    let mut found = binary_head_names(config)?;
    found.retain(|name| dir.header(name).is_some());
    if !found.is_empty() {
        let names: Vec<_> = found.iter().map(|name| format!("`{name}`")).collect();
        warn_once(format!(
            "{}: {} are left out, because the binary head of which they are a part is not complete",
            dir.path().display(),
            names.join(", ")
        ));
    }
    Ok(found)
}

/// Refuses a folder with tensors that are missing, unknown, not floats, or of another shape than
/// the model's.
pub(super) fn check_tensors(
    dir: &HfDir,
    config: &DecoderConfig,
    params: &[HfParam],
    copies: &[Copied],
) -> Result<(), ModelError> {
    let fail = |name: &str, why: String| {
        let path = dir.path().to_path_buf();
        let name = name.to_string();
        Err(ModelError::Tensor { path, name, why })
    };
    let mut known: BTreeSet<&str> = copies.iter().map(|copy| copy.name.as_str()).collect();
    // The number of rows of each stack.
    let mut stacks: BTreeMap<&str, usize> = BTreeMap::new();
    for param in params {
        for part in &param.parts {
            if let Some((stack, row)) = stacked_row(&part.name) {
                let rows = stacks.entry(stack).or_default();
                *rows = (row + 1).max(*rows);
            }
            let mut shape = param.shape.clone();
            *shape
                .last_mut()
                .expect("a parameter has at least one dimension") = part.num_columns();
            if param.transposed {
                shape.reverse();
            }
            let header = dir.require(&part.name)?;
            if header.shape != shape {
                let found = header.shape;
                return fail(
                    &part.name,
                    format!("expected {shape:?} by config.json, found {found:?}"),
                );
            }
            if !header.dtype.is_float() {
                let found = header.dtype;
                return fail(&part.name, format!("expected floats, found {found:?}"));
            }
            known.insert(part.name.as_str());
        }
    }
    for (&stack, &rows) in &stacks {
        let found = dir.require(stack)?.shape[0];
        if found != rows {
            return fail(
                stack,
                format!("expected {rows} experts by config.json, found {found}"),
            );
        }
        known.insert(stack);
    }
    let left_out = parts_of_binary_head(dir, config)?;
    let constants = config.family.definition().constants();
    let ignored = |name: &str| {
        constants.iter().any(|end| name.ends_with(end))
            || left_out.contains(name)
            || (config.tied && name == config.family.head_name())
            || has_mtp_head(dir, config, name)
    };
    match dir
        .tensors()
        .find(|t| !known.contains(t.name.as_str()) && !ignored(&t.name))
    {
        Some(stray) => {
            let family = config.family;
            let why = format!(
                "its shape is {:?}, but the {family} model of config.json has no such tensor",
                stray.shape
            );
            fail(&stray.name, why)
        }
        None => Ok(()),
    }
}

/// Whether a tensor belongs to a layer of multi-token prediction beyond those of the configuration.
fn has_mtp_head(dir: &HfDir, config: &DecoderConfig, name: &str) -> bool {
    let layer = config.family.definition().layer();
    let before = layer
        .split('*')
        .next()
        .expect("split yields at least one part");
    let number = name
        .strip_prefix(before)
        .and_then(|rest| rest.split('.').next()?.parse().ok());
    number
        .is_some_and(|number: usize| number >= config.num_blocks() && predicts(dir, config, number))
}
