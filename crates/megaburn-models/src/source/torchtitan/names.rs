//! The names of torchtitan's Llama 3.

use std::collections::{BTreeMap, BTreeSet};

use megaburn_torch::dcp::DcpDir;

use crate::error::ModelError;

/// The names of tensors in torchtitan and on Hugging Face. Version 0.3 has other names for the
/// output matrix and for the projections in the attention.
const NAMES: &[(&str, &str)] = &[
    ("tok_embeddings.weight", "model.embed_tokens.weight"),
    ("norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
    ("lm_head.weight", "lm_head.weight"),
];

/// The same for the tensors of a layer, after `layers.*.` and `model.layers.*.`.
const OF_LAYER: &[(&str, &str)] = &[
    ("attention.wq.weight", "self_attn.q_proj.weight"),
    ("attention.wk.weight", "self_attn.k_proj.weight"),
    ("attention.wv.weight", "self_attn.v_proj.weight"),
    ("attention.qkv_linear.wq.weight", "self_attn.q_proj.weight"),
    ("attention.qkv_linear.wk.weight", "self_attn.k_proj.weight"),
    ("attention.qkv_linear.wv.weight", "self_attn.v_proj.weight"),
    ("attention.wo.weight", "self_attn.o_proj.weight"),
    ("feed_forward.w1.weight", "mlp.gate_proj.weight"),
    ("feed_forward.w3.weight", "mlp.up_proj.weight"),
    ("feed_forward.w2.weight", "mlp.down_proj.weight"),
    ("attention_norm.weight", "input_layernorm.weight"),
    ("ffn_norm.weight", "post_attention_layernorm.weight"),
];

/// The first parts of names that are not the model's. `freqs_cis` is computed from the
/// configuration.
const IGNORED: [&str; 5] = [
    "optimizer",
    "lr_scheduler",
    "dataloader",
    "train_state",
    "freqs_cis",
];

/// Which tensors of a checkpoint are the model's.
pub(super) struct Names {
    /// The name in the checkpoint, by the name on Hugging Face.
    pub(super) tensors: BTreeMap<String, String>,
    /// The kinds of other state that the checkpoint holds.
    pub(super) ignored: Vec<String>,
}

impl Names {
    /// # Errors
    /// A tensor is neither the model's nor known state, or the model has one twice.
    pub(super) fn of(dir: &DcpDir) -> Result<Self, ModelError> {
        let mut tensors = BTreeMap::new();
        let mut ignored = BTreeSet::new();
        for (name, tensor) in dir.tensors() {
            let fail = |why: String| ModelError::Tensor {
                path: dir.path().to_path_buf(),
                name: name.to_string(),
                why,
            };
            match (hf_name(name), state(name)) {
                (Some(of_hf), _) => {
                    if let Some(other) = tensors.insert(of_hf, name.to_string()) {
                        return Err(fail(format!(
                            "is the same tensor of the model as `{other}`"
                        )));
                    }
                }
                (None, Some(state)) => {
                    ignored.insert(state.to_string());
                }
                (None, None) => {
                    return Err(fail(format!(
                        "is {:?}, but torchtitan's Llama 3, which is the model that is read from \
                        such a folder, has no tensor of this name",
                        tensor.shape()
                    )));
                }
            }
        }
        ignored.extend(dir.objects().filter_map(state).map(String::from));
        let ignored = ignored.into_iter().collect();
        Ok(Self { tensors, ignored })
    }
}

/// Early versions saved the model under `model.`.
fn without_prefix(name: &str) -> &str {
    name.strip_prefix("model.").unwrap_or(name)
}

/// The name on Hugging Face of a tensor of the model.
fn hf_name(name: &str) -> Option<String> {
    let name = without_prefix(name);
    let found = |names: &[(&str, &'static str)], name: &str| {
        let mut names = names.iter();
        names.find_map(|(titan, hf)| (*titan == name).then_some(*hf))
    };
    let Some(of_layer) = name.strip_prefix("layers.") else {
        return found(NAMES, name).map(String::from);
    };
    let (number, part) = of_layer.split_once('.')?;
    let layer: usize = number.parse().ok()?;
    Some(format!("model.layers.{layer}.{}", found(OF_LAYER, part)?))
}

/// The kind of state that a name belongs to, if it is known not to be of the model.
fn state(name: &str) -> Option<&str> {
    let first = without_prefix(name).split('.').next()?;
    IGNORED.contains(&first).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_all_versions_are_known() {
        for (titan, hf) in [
            ("tok_embeddings.weight", "model.embed_tokens.weight"),
            ("model.norm.weight", "model.norm.weight"),
            ("model.output.weight", "lm_head.weight"),
            ("lm_head.weight", "lm_head.weight"),
            (
                "layers.11.attention.wk.weight",
                "model.layers.11.self_attn.k_proj.weight",
            ),
            (
                "layers.0.attention.qkv_linear.wv.weight",
                "model.layers.0.self_attn.v_proj.weight",
            ),
            (
                "model.layers.2.feed_forward.w3.weight",
                "model.layers.2.mlp.up_proj.weight",
            ),
        ] {
            assert_eq!(hf_name(titan).as_deref(), Some(hf));
            assert_eq!(state(titan), None);
        }
        for strange in [
            "layers.0.moe.router.gate.weight",
            "layers.x.attention.wq.weight",
            "norm.bias",
        ] {
            assert_eq!(
                (hf_name(strange), state(strange)),
                (None, None),
                "{strange}"
            );
        }
        for (name, first) in [
            (
                "optimizer.state.layers.0.attention.wq.weight.exp_avg",
                "optimizer",
            ),
            ("model.freqs_cis", "freqs_cis"),
            ("train_state.step", "train_state"),
        ] {
            assert_eq!((hf_name(name), state(name)), (None, Some(first)));
        }
    }
}
