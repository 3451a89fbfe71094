//! Layers that predict further tokens, as a folder of Hugging Face holds them.

use megaburn_checkpoint::HfDir;

use super::{ModelSource, bare_name};
use crate::{DecoderConfig, ModelError, hf::HfParam};

/// A tensor that is a copy of another.
pub(super) struct Copied {
    pub(super) name: String,
    /// The parameter.
    pub(super) path: &'static str,
}

/// The copies that a model's layers have, under the names of a checkpoint without a head if `bare`.
pub(super) fn copies(config: &DecoderConfig, bare: bool) -> Vec<Copied> {
    let named = config.hf_copies().into_iter();
    let copy = |(name, path)| Copied {
        name: bare_name(config, name, bare),
        path,
    };
    named.map(copy).collect()
}

/// Whether the layer of this number predicts further tokens: it has the matrix of one that does.
pub(super) fn predicts(dir: &HfDir, config: &DecoderConfig, number: usize) -> bool {
    let layer = config
        .family
        .spec()
        .layer
        .replacen('*', &number.to_string(), 1);
    let names = [false, true].map(|bare| bare_name(config, format!("{layer}eh_proj.weight"), bare));
    names.iter().any(|name| dir.header(name).is_some())
}

/// Refuses copies that are not equal to what they are copies of: the model has one matrix for both.
///
/// # Errors
/// The first one, by its name.
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
        let of = &of.expect("a whole model has both matrices").parts[0].name;
        if !dir.are_equal(name, of)? {
            let why = format!(
                "is another matrix than `{of}`, of which it must be a copy: the model has one for both; \
                 make them equal, or leave the layer out with `num_nextn_predict_layers` 0 in config.json"
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
    /// The same model without layers that predict further tokens, which take part in nothing but training.
    #[must_use]
    pub fn without_mtp(mut self) -> Self {
        self.config = self.config.without_mtp();
        let has = self
            .config
            .whole_plan()
            .expect("a model is one without them too");
        self.params.retain(|path, _| has.get(path).is_some());
        self
    }
}
