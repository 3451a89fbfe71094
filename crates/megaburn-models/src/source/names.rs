//! The names of a model's tensors on Hugging Face, with the family's prefix or without it.

use crate::{decoder::DecoderConfig, error::ModelError, hf::HfParam};

/// All parameters. If `bare`, names omit the prefix, as in a checkpoint that was saved without its
/// head.
pub(super) fn named_params(config: &DecoderConfig, bare: bool) -> Result<Vec<HfParam>, ModelError> {
    let mut params = config.hf_params()?;
    for part in params.iter_mut().flat_map(|param| &mut param.parts) {
        part.name = bare_name(config, std::mem::take(&mut part.name), bare);
    }
    Ok(params)
}

/// Removes the prefix from a name if `bare`.
pub(super) fn bare_name(config: &DecoderConfig, name: String, bare: bool) -> String {
    let prefix = config.family.definition().optional_prefix();
    name.strip_prefix(prefix)
        .filter(|_| bare)
        .map(str::to_string)
        .unwrap_or(name)
}

/// Today's name of a tensor of a BERT that was published with the names of TensorFlow's norms.
pub(super) fn name_of_today(name: String) -> String {
    let norms = [
        (".LayerNorm.gamma", ".LayerNorm.weight"),
        (".LayerNorm.beta", ".LayerNorm.bias"),
    ];
    let found = norms
        .into_iter()
        .find_map(|(old, new)| Some(format!("{}{new}", name.strip_suffix(old)?)));
    found.unwrap_or(name)
}
