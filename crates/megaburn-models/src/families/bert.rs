//! BERT: an encoder with learned positions, token types, a norm of the embeddings, norms of the
//! residual stream, biases everywhere, the head of a masked language model and, as
//! `BertForPreTraining`, the next-sentence head.
//!
//! Source: Devlin et al., "BERT: Pre-training of deep bidirectional transformers" (2018),
//! <https://arxiv.org/abs/1810.04805>; Transformers `models/bert/modeling_bert.py`. Dropout follows
//! the run's configuration, whatever `config.json` says.

use megaburn_parallel::{Activation, NormKind};
use serde_json::{Value, json};

use super::{
    Family, FamilySpec, HfJson, KeyDefault, Meaning,
    gpt2::{activation, activation_name},
    llama,
};
use crate::{
    decoder::{DecoderConfig, NormPlacement, Positions},
    hf::Key,
};

pub(super) const SPEC: FamilySpec = FamilySpec {
    model_type: "bert",
    architecture: "BertForPreTraining",
    other_architectures: &[MASKED_ONLY],
    description: "BERT, as `BertForPreTraining` and `BertForMaskedLM`.",
    keys: &[KEYS, COMMON_KEYS],
    optional_prefix: "",
    constants: &[".position_ids", "cls.predictions.decoder.bias"],
    layer: "bert.encoder.layer.*.",
    defaults: &[DEFAULTS],
    template,
    follow: |_| {},
    read,
    write,
};

/// The architecture of a model without the next-sentence head.
const MASKED_ONLY: &str = "BertForMaskedLM";

pub(super) fn template() -> DecoderConfig {
    DecoderConfig {
        family: Family::BERT,
        ffn: 512,
        kv_heads: 4,
        positions: Positions::Learned,
        norm: NormKind::Layer,
        norm_eps: 1e-12,
        norm_placement: NormPlacement::Post,
        bidirectional: true,
        embedding_norm: true,
        token_types: 2,
        masked_head: true,
        binary_head: true,
        activation: Activation::Gelu,
        qkv_bias: true,
        output_bias: true,
        mlp_bias: true,
        tied: true,
        ..llama::template()
    }
}

/// The defaults of BERT; Megatron-BERT has the same keys.
pub(super) const DEFAULTS: &[KeyDefault] = &[
    KeyDefault::same("hidden_act", Meaning::Text("gelu")),
    KeyDefault::same("layer_norm_eps", Meaning::Number(1e-12)),
    KeyDefault::same("type_vocab_size", Meaning::Size(2)),
    KeyDefault::same("add_cross_attention", Meaning::Flag(false)),
    KeyDefault::same("tie_word_embeddings", Meaning::Flag(true)),
];

/// BERT normalises the residual stream after attention and MLP, and the embeddings.
const KEYS: &[Key] = &[
    Key::plain("embedding_norm.gamma", "bert.embeddings.LayerNorm.weight"),
    Key::plain("embedding_norm.beta", "bert.embeddings.LayerNorm.bias"),
    Key::plain(
        "blocks.*.attention_output_norm.gamma",
        "bert.encoder.layer.*.attention.output.LayerNorm.weight",
    ),
    Key::plain(
        "blocks.*.attention_output_norm.beta",
        "bert.encoder.layer.*.attention.output.LayerNorm.bias",
    ),
    Key::plain(
        "blocks.*.mlp_output_norm.gamma",
        "bert.encoder.layer.*.output.LayerNorm.weight",
    ),
    Key::plain(
        "blocks.*.mlp_output_norm.beta",
        "bert.encoder.layer.*.output.LayerNorm.bias",
    ),
];

/// The tensors without the norms of the blocks; Megatron-BERT has the same names.
pub(super) const COMMON_KEYS: &[Key] = &[
    Key::plain("embedding.weight", "bert.embeddings.word_embeddings.weight"),
    Key::plain(
        "positions.weight",
        "bert.embeddings.position_embeddings.weight",
    ),
    Key::plain(
        "token_types.weight",
        "bert.embeddings.token_type_embeddings.weight",
    ),
    Key::linear(
        "blocks.*.attention.qkv.weight",
        &[
            "bert.encoder.layer.*.attention.self.query.weight",
            "bert.encoder.layer.*.attention.self.key.weight",
            "bert.encoder.layer.*.attention.self.value.weight",
        ],
    ),
    Key::joined(
        "blocks.*.attention.qkv.bias",
        &[
            "bert.encoder.layer.*.attention.self.query.bias",
            "bert.encoder.layer.*.attention.self.key.bias",
            "bert.encoder.layer.*.attention.self.value.bias",
        ],
    ),
    Key::linear(
        "blocks.*.attention.output.weight",
        &["bert.encoder.layer.*.attention.output.dense.weight"],
    ),
    Key::plain(
        "blocks.*.attention.output.bias",
        "bert.encoder.layer.*.attention.output.dense.bias",
    ),
    Key::linear(
        "blocks.*.mlp.up.weight",
        &["bert.encoder.layer.*.intermediate.dense.weight"],
    ),
    Key::plain(
        "blocks.*.mlp.up.bias",
        "bert.encoder.layer.*.intermediate.dense.bias",
    ),
    Key::linear(
        "blocks.*.mlp.down.weight",
        &["bert.encoder.layer.*.output.dense.weight"],
    ),
    Key::plain(
        "blocks.*.mlp.down.bias",
        "bert.encoder.layer.*.output.dense.bias",
    ),
    Key::linear(
        "masked_head.dense.weight",
        &["cls.predictions.transform.dense.weight"],
    ),
    Key::plain(
        "masked_head.dense.bias",
        "cls.predictions.transform.dense.bias",
    ),
    Key::plain(
        "masked_head.norm.gamma",
        "cls.predictions.transform.LayerNorm.weight",
    ),
    Key::plain(
        "masked_head.norm.beta",
        "cls.predictions.transform.LayerNorm.bias",
    ),
    Key::plain("masked_head.vocab.bias", "cls.predictions.bias"),
    Key::plain("head.weight", "cls.predictions.decoder.weight"),
    Key::linear("binary_head.pooler.weight", &["bert.pooler.dense.weight"]),
    Key::plain("binary_head.pooler.bias", "bert.pooler.dense.bias"),
    Key::linear(
        "binary_head.classifier.weight",
        &["cls.seq_relationship.weight"],
    ),
    Key::plain("binary_head.classifier.bias", "cls.seq_relationship.bias"),
];

fn read(json: &HfJson<'_>) -> Result<DecoderConfig, String> {
    read_as(json, template(), MASKED_ONLY)
}

/// Reads the keys that BERT and Megatron-BERT have in common. A model of the architecture
/// `masked_only` has no next-sentence head.
pub(super) fn read_as(
    json: &HfJson<'_>,
    template: DecoderConfig,
    masked_only: &str,
) -> Result<DecoderConfig, String> {
    json.only("is_decoder", false)?;
    json.only("add_cross_attention", false)?;
    json.only("position_embedding_type", "absolute")?;
    // An untied head has a second bias, which is used instead of `cls.predictions.bias`.
    json.only("tie_word_embeddings", true)?;
    let hidden = json.size("hidden_size")?;
    let heads = json.size("num_attention_heads")?;
    if heads == 0 || !hidden.is_multiple_of(heads) {
        return Err(format!(
            "`hidden_size` {hidden} is not a multiple of `num_attention_heads` {heads}"
        ));
    }
    Ok(DecoderConfig {
        vocab: json.size("vocab_size")?,
        hidden,
        ffn: json.size("intermediate_size")?,
        layers: json.layers("num_hidden_layers")?,
        heads,
        kv_heads: heads,
        head_dim: hidden / heads,
        max_seq_len: json.size("max_position_embeddings")?,
        token_types: json.size("type_vocab_size")?,
        norm_eps: json.number("layer_norm_eps")?,
        activation: activation(json, "hidden_act")?,
        binary_head: !json.has_architecture(masked_only),
        ..template
    })
}

fn write(config: &DecoderConfig) -> Value {
    write_as(config, MASKED_ONLY)
}

/// The inverse of [`read_as`].
pub(super) fn write_as(config: &DecoderConfig, masked_only: &str) -> Value {
    let mut json = json!({
        "hidden_act": activation_name(config.activation),
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "is_decoder": false,
        "layer_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_seq_len,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "type_vocab_size": config.token_types,
    });
    if !config.binary_head {
        json["architectures"] = json!([masked_only]);
    }
    json
}
