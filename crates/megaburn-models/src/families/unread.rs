//! Finds keys of a `config.json` that are not read.

use std::{collections::BTreeSet, path::Path};

use megaburn_checkpoint::hf::QUANTIZATION;
use serde_json::Value;

use super::{Family, MTP_LAYERS, defaults::Meaning, json::is_same};
use crate::warn_once::warn_once;

/// Keys with which other architectures compute something else, each with the value that has no
/// effect.
const CHANGING: &[(&str, Meaning)] = &[
    // Granite.
    ("attention_multiplier", Meaning::Nothing),
    ("embedding_multiplier", Meaning::Number(1.0)),
    ("logits_scaling", Meaning::Number(1.0)),
    ("residual_multiplier", Meaning::Number(1.0)),
    // Gemma.
    ("attn_logit_softcapping", Meaning::Nothing),
    ("final_logit_softcapping", Meaning::Nothing),
    ("query_pre_attn_scalar", Meaning::Nothing),
    // Cohere, OLMo, MiniCPM, Llama 4, GPT-NeoX.
    ("logit_scale", Meaning::Number(1.0)),
    ("clip_qkv", Meaning::Nothing),
    ("scale_emb", Meaning::Number(1.0)),
    ("scale_depth", Meaning::Nothing),
    ("attention_chunk_size", Meaning::Nothing),
    ("use_parallel_residual", Meaning::Flag(false)),
    // StarCoder2.
    ("mlp_type", Meaning::Text("default")),
    ("norm_type", Meaning::Text("layer_norm")),
    ("rotary_pct", Meaning::Number(1.0)),
];

/// Keys that all families read except those with learned positions.
const ROTARY: [&str; 5] = [
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "original_max_position_embeddings",
    "partial_rotary_factor",
];

/// Keys that do not change what a model computes. Keys that start with `_` or end with `_token_id`
/// are also harmless. `docs/families.md` says what is left out of training.
const HARMLESS: &[&str] = &[
    "architectures",
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_implementation",
    "attn_pdrop",
    "aux_loss_alpha",
    "auto_map",
    "bad_words_ids",
    "cache_implementation",
    "chunk_size_feed_forward",
    "classifier_dropout",
    "do_sample",
    "dropout_rate",
    "dtype",
    "embd_pdrop",
    "embedding_dropout",
    "ep_size",
    "hidden_dropout",
    "hidden_dropout_prob",
    "id2label",
    "initializer_factor",
    "initializer_range",
    "is_decoder",
    "label2id",
    "length_penalty",
    "max_length",
    "model_type",
    "n_ctx",
    "num_beams",
    "num_return_sequences",
    "output_past",
    "output_router_logits",
    "pretraining_tp",
    "repetition_penalty",
    "resid_pdrop",
    "residual_dropout",
    "return_dict",
    "router_aux_loss_coef",
    "seq_aux",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "task_specific_params",
    "temperature",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    // These follow from other keys.
    "head_dim",
    "num_experts",
    "qk_head_dim",
    // These are read if they are present.
    "experts_per_token",
    "initial_context_length",
    "rope_local_base_freq",
    "rope_percent",
    "moe_layer_freq",
    QUANTIZATION,
    "scoring_func",
    "sliding_window_pattern",
    MTP_LAYERS,
];

/// The keys of a family's `config.json` that have a value and are unknown.
///
/// # Errors
/// A key with which the model would compute something else.
pub(super) fn unread(json: &Value, family: Family) -> Result<Vec<&str>, String> {
    let written = family.template().to_hf();
    let defaults = family.definition().defaults().iter().copied().flatten();
    let mut known: BTreeSet<&str> = defaults.map(|default| default.key).collect();
    known.extend(HARMLESS.iter().chain(&ROTARY));
    known.extend(
        written
            .as_object()
            .into_iter()
            .flatten()
            .map(|(key, _)| key.as_str()),
    );
    let is_known =
        |key: &str| known.contains(key) || key.starts_with('_') || key.ends_with("_token_id");
    let mut unread = Vec::new();
    for (key, value) in json.as_object().into_iter().flatten() {
        // Switched-off features change nothing.
        if value.is_null() || *value == Value::Bool(false) || is_known(key) {
            continue;
        }
        match CHANGING.iter().find(|(changing, _)| changing == key) {
            Some((_, neutral)) if is_same(value, &neutral.to_json()) => {}
            Some(_) => {
                return Err(format!(
                    "`{key}` is {value}: the key changes the computation of models of other \
                    architectures, and {family} has no such key; is `architectures` right?"
                ));
            }
            None => unread.push(key.as_str()),
        }
    }
    Ok(unread)
}

/// Warns about unread keys, once per file.
pub(super) fn warn(keys: &[&str], path: &Path) {
    if keys.is_empty() {
        return;
    }
    let keys: Vec<String> = keys.iter().map(|key| format!("`{key}`")).collect();
    warn_once(format!(
        "{} of {} {} unknown and ignored: if the model depends on it, results will differ",
        keys.join(", "),
        path.display(),
        if keys.len() == 1 { "is" } else { "are" }
    ));
}
