//! Which tensors of an exported model are quantised, and which stay as they are.

use std::collections::BTreeSet;

use megaburn_checkpoint::hf::{HfQuantization, stacked_row};
use serde_json::Value;

use crate::{error::ModelError, hf::HfPart, source::ModelSource};

/// Linear layers of blocks that engines multiply in the model's own type: the gates of experts, and
/// the projection of multi-token prediction in front of its block.
const KEPT: [&str; 3] = [
    ".moe.router.weight",
    ".moe.shared_gate.weight",
    ".mtp.eh_proj.weight",
];

/// The tensors of an export in FP8.
#[derive(Debug)]
pub(crate) struct QuantizedTensors {
    /// The weights that are quantised: those of the linear layers of attention, MLPs and experts.
    pub(crate) names: BTreeSet<String>,
    /// The entry `quantization_config` of `config.json`, which names the linear layers that are not.
    pub(crate) config: Value,
}

impl QuantizedTensors {
    /// The tensors of a model in the form `form`.
    ///
    /// # Errors
    /// The family publishes experts in stacks, or weights as `[in, out]`, which engines do not read
    /// in FP8.
    pub(crate) fn of(source: &ModelSource, form: HfQuantization) -> Result<Self, ModelError> {
        let refuse = |why: &str| {
            let family = source.config().family;
            Err(ModelError::File {
                path: source.path().to_path_buf(),
                why: format!("{family} models {why}; export it without --quantize"),
            })
        };
        let mut names = BTreeSet::new();
        let mut kept = BTreeSet::new();
        for param in source.params() {
            let is_weight = param.path.starts_with("blocks.") && param.path.ends_with(".weight");
            if !is_weight || param.shape.len() != 2 {
                continue;
            }
            for HfPart { name, .. } in &param.parts {
                if stacked_row(name).is_some() {
                    return refuse("publish experts in stacks, which no engine reads in FP8");
                }
                if KEPT.iter().any(|end| param.path.ends_with(end)) {
                    kept.insert(module(name));
                } else if param.transposed {
                    names.insert(name.clone());
                }
            }
        }
        if names.is_empty() {
            return refuse("publish weights as [in, out], which no engine reads in FP8");
        }
        let copies = source.config().hf_copies();
        let heads = copies.iter().filter(|(_, path)| *path == "head.weight");
        kept.extend(heads.map(|(name, _)| module(name)));
        kept.extend(source.config().family.find_head_name().map(module));
        Ok(Self {
            names,
            config: form.config(&Vec::from_iter(kept)),
        })
    }
}

/// The name of the layer that has a weight.
fn module(weight: &str) -> String {
    weight.strip_suffix(".weight").unwrap_or(weight).to_string()
}
