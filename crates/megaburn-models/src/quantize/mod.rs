//! Which tensors of an exported model are quantised, and which stay as they are.

mod engine;
mod run_precision;

use std::collections::BTreeSet;

use megaburn_checkpoint::hf::{HfQuantization, stacked_row};
use serde_json::Value;

use self::{
    engine::{cut_block, is_expert},
    run_precision::RunPrecision,
};
use crate::{
    error::ModelError,
    hf::{HfParam, HfPart},
    source::ModelSource,
};

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
    /// The weights that are quantised: those of the linear layers of attention, MLPs and experts
    /// that the run did not keep in its own type.
    pub(crate) names: BTreeSet<String>,
    /// Their form. Scales of blocks are powers of two if those of the run were.
    pub(crate) form: HfQuantization,
    /// The entry `quantization_config` of `config.json`, which names the linear layers that are not
    /// quantised.
    pub(crate) config: Value,
}

impl QuantizedTensors {
    /// The tensors of a model in the form `form`.
    ///
    /// # Errors
    /// The family publishes experts in stacks, or weights as `[in, out]`, which engines do not read
    /// in FP8; the run kept all layers in its own type; or engines do not start the model in this
    /// form.
    pub(crate) fn of(source: &ModelSource, form: HfQuantization) -> Result<Self, ModelError> {
        let refuse = |why: String| {
            Err(ModelError::File {
                path: source.path().to_path_buf(),
                why,
            })
        };
        let family = source.config().family;
        let run = source.checkpoint().map(RunPrecision::of);
        let run = run.unwrap_or_default();
        let mut quantized = Vec::new();
        let mut kept = BTreeSet::new();
        let mut kept_by_run = 0;
        for param in source.params() {
            if !param.path.ends_with(".weight") || param.shape.len() != 2 {
                continue;
            }
            let modules = param.parts.iter().map(|HfPart { name, .. }| module(name));
            if !param.path.starts_with("blocks.") {
                // Embeddings and their like are no linear layers.
                kept.extend(modules.filter(|_| param.transposed));
                continue;
            }
            let mut names = param.parts.iter().map(|HfPart { name, .. }| name);
            if names.any(|name| stacked_row(name).is_some()) {
                return refuse(format!(
                    "{family} models publish experts in stacks, which no engine reads in FP8; \
                    export it without --quantize"
                ));
            }
            if KEPT.iter().any(|end| param.path.ends_with(end)) || !param.transposed {
                kept.extend(modules);
            } else if run.keeps(&param.path, source.config().layers) {
                kept.extend(modules);
                kept_by_run += 1;
            } else {
                quantized.push(param);
            }
        }
        if quantized.is_empty() && kept_by_run > 0 {
            return refuse(
                "its run kept all linear layers in its own type; export it without --quantize"
                    .into(),
            );
        }
        if quantized.is_empty() {
            return refuse(format!(
                "{family} models publish weights as [in, out], which no engine reads in FP8; export \
                it without --quantize"
            ));
        }
        check_engines(source, form, &quantized)?;
        if kept_by_run > 0 {
            tracing::warn!(
                "{kept_by_run} weights of linear layers are not quantised, because the run kept them \
                in its own type ([precision])"
            );
        }
        let copies = source.config().hf_copies();
        let heads = copies.iter().filter(|(_, path)| *path == "head.weight");
        kept.extend(heads.map(|(name, _)| module(name)));
        kept.extend(family.find_head_name().map(module));
        let form = match form {
            HfQuantization::Block { powers_of_two } => HfQuantization::Block {
                powers_of_two: powers_of_two || run.has_powers_of_two,
            },
            form => form,
        };
        Ok(Self {
            names: quantized.into_iter().flat_map(HfParam::names).collect(),
            form,
            config: form.config(&Vec::from_iter(kept)),
        })
    }
}

/// Refuses a form in which engines do not start the model.
fn check_engines(
    source: &ModelSource,
    form: HfQuantization,
    quantized: &[&HfParam],
) -> Result<(), ModelError> {
    let refuse = |name: &str, why: String| {
        Err(ModelError::Tensor {
            path: source.path().to_path_buf(),
            name: name.to_string(),
            why: format!("{why}; use --quantize fp8-channel"),
        })
    };
    match form {
        HfQuantization::Channel => Ok(()),
        HfQuantization::Tensor => match quantized.iter().find(|param| is_expert(param)) {
            Some(expert) => refuse(
                &expert.parts[0].name,
                "vLLM starts no experts with one scale per weight and one per token".into(),
            ),
            None => Ok(()),
        },
        HfQuantization::Block { .. } => {
            let mut cut = quantized
                .iter()
                .filter_map(|param| cut_block(source.config(), param));
            match cut.next() {
                Some((name, rows)) => refuse(
                    name,
                    format!(
                        "vLLM does not start a model with blocks of {0} by {0} in which these {rows} \
                        rows are no multiple of {0}, because it concatenates them with others",
                        HfQuantization::BLOCK
                    ),
                ),
                None => Ok(()),
            }
        }
    }
}

/// The name of the layer that has a weight.
fn module(weight: &str) -> String {
    weight.strip_suffix(".weight").unwrap_or(weight).to_string()
}
