//! GPT-NeoX and Pythia: LayerNorm, biases everywhere, rotary positions in a part of each head, and
//! an MLP that is applied next to the attention.
//!
//! Source: Black et al., "GPT-NeoX-20B" (2022), <https://arxiv.org/abs/2204.06745>; Biderman et
//! al., "Pythia" (2023), <https://arxiv.org/abs/2304.01373>.

use megaburn_parallel::{Activation, NormKind};
use serde_json::{Value, json};

use super::{
    Family, FamilySpec, HfJson, KeyDefault, Meaning, gpt2, llama,
    rotary::{rope_parameters, write_percent},
};
use crate::{
    decoder::{BlockOrder, DecoderConfig, Positions, Rotary},
    hf::Key,
};

pub(super) const SPEC: FamilySpec = FamilySpec {
    model_type: "gpt_neox",
    architecture: "GPTNeoXForCausalLM",
    other_architectures: &[],
    description: "GPT-NeoX and Pythia.",
    keys: &[KEYS],
    optional_prefix: "gpt_neox.",
    constants: &[
        ".attention.bias",
        ".attention.masked_bias",
        ".rotary_emb.inv_freq",
    ],
    layer: "gpt_neox.layers.*.",
    defaults: &[DEFAULTS],
    template,
    follow: |_| {},
    read,
    write,
};

/// The fraction of a head that is rotated, unless `config.json` has another.
const PERCENT: f64 = 0.25;
/// The base of the rotation, unless `config.json` has another.
const BASE: f64 = 10_000.0;

fn template() -> DecoderConfig {
    DecoderConfig {
        family: Family::GPT_NEOX,
        ffn: 512,
        kv_heads: 4,
        norm: NormKind::Layer,
        block_order: BlockOrder::Parallel,
        activation: Activation::Gelu,
        qkv_bias: true,
        output_bias: true,
        mlp_bias: true,
        positions: Positions::Rotary(Rotary {
            percent: PERCENT,
            ..Rotary::new(BASE)
        }),
        ..llama::template()
    }
}

const DEFAULTS: &[KeyDefault] = &[
    KeyDefault::same("hidden_act", Meaning::Text("gelu")),
    KeyDefault::same("layer_norm_eps", Meaning::Number(1e-5)),
    KeyDefault::same("attention_bias", Meaning::Flag(true)),
    KeyDefault::same("use_parallel_residual", Meaning::Flag(true)),
    KeyDefault::same("rotary_pct", Meaning::Number(PERCENT)),
    KeyDefault::same("rotary_emb_base", Meaning::Number(BASE)),
    KeyDefault::same("tie_word_embeddings", Meaning::Flag(false)),
];

const KEYS: &[Key] = &[
    Key::plain("embedding.weight", "gpt_neox.embed_in.weight"),
    Key::plain("norm.gamma", "gpt_neox.final_layer_norm.weight"),
    Key::plain("norm.beta", "gpt_neox.final_layer_norm.bias"),
    Key::plain("head.weight", "embed_out.weight"),
    Key::plain(
        "blocks.*.attention_norm.gamma",
        "gpt_neox.layers.*.input_layernorm.weight",
    ),
    Key::plain(
        "blocks.*.attention_norm.beta",
        "gpt_neox.layers.*.input_layernorm.bias",
    ),
    Key::plain(
        "blocks.*.mlp_norm.gamma",
        "gpt_neox.layers.*.post_attention_layernorm.weight",
    ),
    Key::plain(
        "blocks.*.mlp_norm.beta",
        "gpt_neox.layers.*.post_attention_layernorm.bias",
    ),
    Key::grouped_qkv(
        "blocks.*.attention.qkv.weight",
        "gpt_neox.layers.*.attention.query_key_value.weight",
    ),
    Key::grouped_qkv(
        "blocks.*.attention.qkv.bias",
        "gpt_neox.layers.*.attention.query_key_value.bias",
    ),
    Key::linear(
        "blocks.*.attention.output.weight",
        &["gpt_neox.layers.*.attention.dense.weight"],
    ),
    Key::plain(
        "blocks.*.attention.output.bias",
        "gpt_neox.layers.*.attention.dense.bias",
    ),
    Key::linear(
        "blocks.*.mlp.up.weight",
        &["gpt_neox.layers.*.mlp.dense_h_to_4h.weight"],
    ),
    Key::plain(
        "blocks.*.mlp.up.bias",
        "gpt_neox.layers.*.mlp.dense_h_to_4h.bias",
    ),
    Key::linear(
        "blocks.*.mlp.down.weight",
        &["gpt_neox.layers.*.mlp.dense_4h_to_h.weight"],
    ),
    Key::plain(
        "blocks.*.mlp.down.bias",
        "gpt_neox.layers.*.mlp.dense_4h_to_h.bias",
    ),
];

fn read(json: &HfJson<'_>) -> Result<DecoderConfig, String> {
    let hidden = json.size("hidden_size")?;
    let heads = json.size("num_attention_heads")?;
    if heads == 0 || !hidden.is_multiple_of(heads) {
        return Err(format!(
            "`hidden_size` {hidden} is not a multiple of `num_attention_heads` {heads}"
        ));
    }
    let is_parallel = json.flag("use_parallel_residual")?;
    let bias = json.flag("attention_bias")?;
    json.only("head_dim", hidden / heads)?;
    let rotary = json.rotary_named("rotary_emb_base", "rotary_pct", PERCENT)?;
    Ok(DecoderConfig {
        vocab: json.size("vocab_size")?,
        hidden,
        ffn: json.size("intermediate_size")?,
        layers: json.layers("num_hidden_layers")?,
        heads,
        kv_heads: heads,
        head_dim: hidden / heads,
        max_seq_len: json.size("max_position_embeddings")?,
        positions: Positions::Rotary(rotary),
        norm_eps: json.number("layer_norm_eps")?,
        block_order: if is_parallel {
            BlockOrder::Parallel
        } else {
            BlockOrder::Serial
        },
        activation: gpt2::activation(json, "hidden_act")?,
        qkv_bias: bias,
        output_bias: bias,
        tied: json.flag("tie_word_embeddings")?,
        ..template()
    })
}

fn write(config: &DecoderConfig) -> Value {
    let mut json = json!({
        "hidden_act": gpt2::activation_name(config.activation),
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "max_position_embeddings": config.max_seq_len,
        "layer_norm_eps": config.norm_eps,
        "attention_bias": config.qkv_bias,
        "use_parallel_residual": config.block_order == BlockOrder::Parallel,
        "rope_parameters": rope_parameters(&config.positions),
    });
    write_percent(&config.positions, &mut json);
    json
}
