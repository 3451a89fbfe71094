//! Llama 2, 3 and 3.x: RMSNorm, rotary positions, grouped-query attention, SwiGLU. A Llama is a
//! [`Decoder`](crate::Decoder) with the parts of [`template`]; this file holds its sizes and its
//! names on Hugging Face.
//!
//! Source: Touvron et al., "Llama 2" (2023); Grattafiori et al., "The Llama 3 herd of models"
//! (2024).

use megaburn_parallel::{Activation, NormKind};
use serde_json::{Value, json};

use super::{
    Family, FamilySpec, HfJson, KeyDefault, Meaning,
    rotary::{longest, max_position_embeddings, rope_parameters},
};
use crate::{
    decoder::{
        BlockOrder, DecoderConfig, Multipliers, NormPlacement, Positions, Rotary, megatron_init_std,
    },
    hf::Key,
};

pub(super) const SPEC: FamilySpec = FamilySpec {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    other_architectures: &[],
    description: "Llama 2, 3 and 3.x.",
    keys: &[KEYS],
    optional_prefix: "model.",
    constants: &[".rotary_emb.inv_freq"],
    layer: "model.layers.*.",
    defaults: &[DEFAULTS, COMMON],
    template,
    follow: |_| {},
    read,
    write,
};

pub(super) fn template() -> DecoderConfig {
    DecoderConfig {
        family: Family::LLAMA,
        vocab: 260,
        hidden: 128,
        ffn: 384,
        layers: 4,
        heads: 4,
        kv_heads: 2,
        head_dim: 32,
        max_seq_len: 128,
        positions: Positions::Rotary(Rotary::new(10_000.0)),
        norm: NormKind::Rms,
        norm_eps: 1e-5,
        norm_placement: NormPlacement::Pre,
        bidirectional: false,
        embedding_norm: false,
        token_types: 0,
        encoder_layers: 0,
        masked_head: false,
        binary_head: false,
        zero_centered_gamma: false,
        block_order: BlockOrder::Serial,
        activation: Activation::SwiGlu,
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        qk_norm: None,
        attention_scale: None,
        attention_soft_cap: None,
        attention_sinks: false,
        mup_base_hidden: None,
        logits_soft_cap: None,
        multipliers: Multipliers::default(),
        window: None,
        full_layers: Vec::new(),
        tied: false,
        init_std: megatron_init_std(),
        experts: None,
        latent: None,
        mtp_layers: 0,
    }
}

const DEFAULTS: &[KeyDefault] = &[
    // Defaults to the number of query heads.
    KeyDefault::same("num_key_value_heads", Meaning::Nothing),
    // Defaults to the width divided by the number of query heads.
    KeyDefault::same("head_dim", Meaning::Nothing),
    KeyDefault::same("attention_bias", Meaning::Flag(false)),
    KeyDefault::same("mlp_bias", Meaning::Flag(false)),
];

/// The defaults of all families with rotary positions, unless a family has its own.
pub const COMMON: &[KeyDefault] = &[
    KeyDefault::same("hidden_act", Meaning::Text("silu")),
    KeyDefault::same("rms_norm_eps", Meaning::Number(1e-6)),
    KeyDefault::same("rope_theta", Meaning::Number(10_000.0)),
    KeyDefault::same("tie_word_embeddings", Meaning::Flag(false)),
];

/// The names of tensors; Mistral and Qwen have the same.
pub const KEYS: &[Key] = &[
    Key::plain("embedding.weight", "model.embed_tokens.weight"),
    Key::plain("norm.gamma", "model.norm.weight"),
    Key::plain("head.weight", "lm_head.weight"),
    Key::plain(
        "blocks.*.attention_norm.gamma",
        "model.layers.*.input_layernorm.weight",
    ),
    Key::plain(
        "blocks.*.mlp_norm.gamma",
        "model.layers.*.post_attention_layernorm.weight",
    ),
    Key::linear(
        "blocks.*.attention.qkv.weight",
        &[
            "model.layers.*.self_attn.q_proj.weight",
            "model.layers.*.self_attn.k_proj.weight",
            "model.layers.*.self_attn.v_proj.weight",
        ],
    ),
    Key::joined(
        "blocks.*.attention.qkv.bias",
        &[
            "model.layers.*.self_attn.q_proj.bias",
            "model.layers.*.self_attn.k_proj.bias",
            "model.layers.*.self_attn.v_proj.bias",
        ],
    ),
    Key::linear(
        "blocks.*.attention.output.weight",
        &["model.layers.*.self_attn.o_proj.weight"],
    ),
    Key::plain(
        "blocks.*.attention.output.bias",
        "model.layers.*.self_attn.o_proj.bias",
    ),
    Key::linear(
        "blocks.*.mlp.up.weight",
        &[
            "model.layers.*.mlp.gate_proj.weight",
            "model.layers.*.mlp.up_proj.weight",
        ],
    ),
    Key::joined(
        "blocks.*.mlp.up.bias",
        &[
            "model.layers.*.mlp.gate_proj.bias",
            "model.layers.*.mlp.up_proj.bias",
        ],
    ),
    Key::linear(
        "blocks.*.mlp.down.weight",
        &["model.layers.*.mlp.down_proj.weight"],
    ),
    Key::plain(
        "blocks.*.mlp.down.bias",
        "model.layers.*.mlp.down_proj.bias",
    ),
    // The additional tensors of multi-token prediction, with DeepSeek-V3's names.
    Key::plain("blocks.*.mtp.enorm.gamma", "model.layers.*.enorm.weight"),
    Key::plain("blocks.*.mtp.hnorm.gamma", "model.layers.*.hnorm.weight"),
    Key::linear(
        "blocks.*.mtp.eh_proj.weight",
        &["model.layers.*.eh_proj.weight"],
    ),
    Key::plain(
        "blocks.*.mtp.norm.gamma",
        "model.layers.*.shared_head.norm.weight",
    ),
];

/// Reads the keys of `config.json` that Llama and its successors share into a family's `template`.
pub(super) fn read_sizes(
    json: &HfJson<'_>,
    template: DecoderConfig,
) -> Result<DecoderConfig, String> {
    json.only("hidden_act", "silu")?;
    let positions = Positions::Rotary(json.rotary()?);
    let sizes = read_plain_sizes(json, template)?;
    Ok(DecoderConfig {
        max_seq_len: longest(&positions, sizes.max_seq_len),
        positions,
        norm_eps: json.number("rms_norm_eps")?,
        ..sizes
    })
}

/// Reads the sizes that all families with Llama's names of keys have. The activation, the positions
/// and the epsilon of norms are the family's own.
pub fn read_plain_sizes(
    json: &HfJson<'_>,
    template: DecoderConfig,
) -> Result<DecoderConfig, String> {
    let hidden = json.size("hidden_size")?;
    let heads = json.size("num_attention_heads")?;
    Ok(DecoderConfig {
        vocab: json.size("vocab_size")?,
        hidden,
        ffn: json.size("intermediate_size")?,
        layers: json.layers("num_hidden_layers")?,
        heads,
        kv_heads: json.optional_size("num_key_value_heads")?.unwrap_or(heads),
        head_dim: json
            .optional_size("head_dim")?
            .unwrap_or(hidden / heads.max(1)),
        max_seq_len: json.size("max_position_embeddings")?,
        tied: json.flag("tie_word_embeddings")?,
        ..template
    })
}

fn read(json: &HfJson<'_>) -> Result<DecoderConfig, String> {
    let bias = json.flag("attention_bias")?;
    Ok(DecoderConfig {
        qkv_bias: bias,
        output_bias: bias,
        mlp_bias: json.flag("mlp_bias")?,
        ..read_sizes(json, template())?
    })
}

/// The inverse of `read_sizes`.
pub fn write_sizes(config: &DecoderConfig) -> Value {
    json!({
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": max_position_embeddings(config),
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope_parameters(&config.positions),
    })
}

/// Gives a key of `json` another name.
pub(super) fn rename(json: &mut Value, from: &str, to: &str) {
    let value = json.as_object_mut().and_then(|keys| keys.remove(from));
    json[to] = value.unwrap_or_default();
}

fn write(config: &DecoderConfig) -> Value {
    let mut json = write_sizes(config);
    json["attention_bias"] = config.qkv_bias.into();
    json["mlp_bias"] = config.mlp_bias.into();
    json
}
