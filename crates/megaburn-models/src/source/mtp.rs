//! Multi-token prediction layers in a Hugging Face folder.

use megaburn_checkpoint::HfDir;

use super::{ModelSource, names::bare_name};
use crate::{decoder::DecoderConfig, error::ModelError, hf::HfParam};

/// A tensor that is a copy of a parameter.
pub(super) struct Copied {
    pub(super) name: String,
    /// The path of the parameter.
    pub(super) path: &'static str,
}

/// The copies in the layers of multi-token prediction. If `bare`, names omit the prefix.
pub(super) fn copies(config: &DecoderConfig, bare: bool) -> Vec<Copied> {
    let named = config.hf_copies().into_iter();
    let copy = |(name, path)| Copied {
        name: bare_name(config, name, bare),
        path,
    };
    named.map(copy).collect()
}

/// Whether layer `number` is one of multi-token prediction, i.e. has an `eh_proj`.
pub(super) fn predicts(dir: &HfDir, config: &DecoderConfig, number: usize) -> bool {
    let layer = config.family.definition().layer();
    let layer = layer.replacen('*', &number.to_string(), 1);
    let names = [false, true].map(|bare| bare_name(config, format!("{layer}eh_proj.weight"), bare));
    names.iter().any(|name| dir.header(name).is_some())
}

/// Refuses copies that differ from their parameter, because the model has one matrix for both.
///
/// # Errors
/// The first copy that differs, by name.
pub(super) fn check_copies(
    dir: &HfDir,
    params: &[HfParam],
    copies: &[Copied],
) -> Result<(), ModelError> {
    for Copied { name, path } in copies {
        if dir.header(name).is_none() {
            continue;
        }
        let of = params.iter().find(|param| param.path == *path);
        let of = &of.expect("a complete model has both matrices").parts[0].name;
        if !dir.are_equal(name, of)? {
            let why = format!(
                "differs from `{of}`, of which it must be a copy: the model has one matrix for \
                both; make them equal, or drop the layer with `num_nextn_predict_layers` 0 in \
                config.json"
            );
            let path = dir.path().to_path_buf();
            return Err(ModelError::Tensor {
                path,
                name: name.clone(),
                why,
            });
        }
    }
    Ok(())
}

impl ModelSource {
    /// The same model without the layers of multi-token prediction, which are used in training
    /// only.
    #[must_use]
    pub fn without_mtp(mut self) -> Self {
        self.config = self.config.without_mtp();
        let has = self
            .config
            .whole_plan()
            .expect("the model is valid without MTP blocks");
        self.params.retain(|path, _| has.get(path).is_some());
        self
    }
}
