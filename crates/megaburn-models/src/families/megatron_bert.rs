//! Megatron-BERT: a BERT with norms before attention and MLP, a norm after the last block, and no
//! norm of the embeddings, as Megatron-LM trains it.
//!
//! Source: Shoeybi et al., "Megatron-LM" (2019), <https://arxiv.org/abs/1909.08053>, section 5.3;
//! Transformers `models/megatron_bert/modeling_megatron_bert.py`.

use serde_json::Value;

use super::{Family, FamilySpec, HfJson, bert};
use crate::{
    decoder::{DecoderConfig, NormPlacement},
    hf::Key,
};

pub(super) const SPEC: FamilySpec = FamilySpec {
    model_type: "megatron-bert",
    architecture: "MegatronBertForPreTraining",
    other_architectures: &[MASKED_ONLY],
    description: "BERT with norms before attention and MLP, as Megatron-LM trains it.",
    keys: &[KEYS, bert::COMMON_KEYS],
    template,
    read,
    write,
    ..bert::SPEC
};

/// The architecture of a model without the next-sentence head.
const MASKED_ONLY: &str = "MegatronBertForMaskedLM";

fn template() -> DecoderConfig {
    DecoderConfig {
        family: Family::MEGATRON_BERT,
        norm_placement: NormPlacement::Pre,
        embedding_norm: false,
        ..bert::template()
    }
}

const KEYS: &[Key] = &[
    Key::plain(
        "blocks.*.attention_norm.gamma",
        "bert.encoder.layer.*.attention.ln.weight",
    ),
    Key::plain(
        "blocks.*.attention_norm.beta",
        "bert.encoder.layer.*.attention.ln.bias",
    ),
    Key::plain("blocks.*.mlp_norm.gamma", "bert.encoder.layer.*.ln.weight"),
    Key::plain("blocks.*.mlp_norm.beta", "bert.encoder.layer.*.ln.bias"),
    Key::plain("norm.gamma", "bert.encoder.ln.weight"),
    Key::plain("norm.beta", "bert.encoder.ln.bias"),
];

fn read(json: &HfJson<'_>) -> Result<DecoderConfig, String> {
    bert::read_as(json, template(), MASKED_ONLY)
}

fn write(config: &DecoderConfig) -> Value {
    bert::write_as(config, MASKED_ONLY)
}
