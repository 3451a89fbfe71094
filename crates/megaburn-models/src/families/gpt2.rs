//! GPT-2: learned positions, LayerNorm, the tanh approximation of GELU, biases everywhere.
//!
//! Source: Radford et al., "Language models are unsupervised multitask learners" (2019). Dropout is
//! not applied, whatever `config.json` says.

use megaburn_parallel::{Activation, NormKind};
use serde_json::{Value, json};

use super::{Family, FamilySpec, HfJson, KeyDefault, Meaning, llama};
use crate::{
    decoder::{DecoderConfig, Positions},
    hf::Key,
};

pub(super) const SPEC: FamilySpec = FamilySpec {
    model_type: "gpt2",
    architecture: "GPT2LMHeadModel",
    other_architectures: &[],
    description: "GPT-2: Radford et al., \"Language models are unsupervised multitask learners\" \
        (2019).",
    keys: &[KEYS],
    optional_prefix: "transformer.",
    constants: &[".attn.bias", ".attn.masked_bias"],
    layer: "transformer.h.*.",
    defaults: &[DEFAULTS],
    template,
    follow: |_| {},
    read,
    write,
};

fn template() -> DecoderConfig {
    DecoderConfig {
        family: Family::GPT2,
        ffn: 512,
        kv_heads: 4,
        positions: Positions::Learned,
        norm: NormKind::Layer,
        activation: Activation::GeluTanh,
        qkv_bias: true,
        output_bias: true,
        mlp_bias: true,
        tied: true,
        ..llama::template()
    }
}

const DEFAULTS: &[KeyDefault] = &[
    KeyDefault::same("activation_function", Meaning::Text("gelu_new")),
    // Defaults to four times the width.
    KeyDefault::same("n_inner", Meaning::Nothing),
    KeyDefault::same("layer_norm_epsilon", Meaning::Number(1e-5)),
    KeyDefault::same("tie_word_embeddings", Meaning::Flag(true)),
    KeyDefault::same("scale_attn_weights", Meaning::Flag(true)),
    KeyDefault::same("scale_attn_by_inverse_layer_idx", Meaning::Flag(false)),
    KeyDefault::same("reorder_and_upcast_attn", Meaning::Flag(false)),
    KeyDefault::same("add_cross_attention", Meaning::Flag(false)),
];

/// The names of tensors. GPT-2 stores linear weights as `[in, out]` like megaburn, and queries,
/// keys and values in one tensor.
const KEYS: &[Key] = &[
    Key::plain("embedding.weight", "transformer.wte.weight"),
    Key::plain("positions.weight", "transformer.wpe.weight"),
    Key::plain("norm.gamma", "transformer.ln_f.weight"),
    Key::plain("norm.beta", "transformer.ln_f.bias"),
    Key::plain("head.weight", "lm_head.weight"),
    Key::plain(
        "blocks.*.attention_norm.gamma",
        "transformer.h.*.ln_1.weight",
    ),
    Key::plain("blocks.*.attention_norm.beta", "transformer.h.*.ln_1.bias"),
    Key::plain(
        "blocks.*.attention.qkv.weight",
        "transformer.h.*.attn.c_attn.weight",
    ),
    Key::plain(
        "blocks.*.attention.qkv.bias",
        "transformer.h.*.attn.c_attn.bias",
    ),
    Key::plain(
        "blocks.*.attention.output.weight",
        "transformer.h.*.attn.c_proj.weight",
    ),
    Key::plain(
        "blocks.*.attention.output.bias",
        "transformer.h.*.attn.c_proj.bias",
    ),
    Key::plain("blocks.*.mlp_norm.gamma", "transformer.h.*.ln_2.weight"),
    Key::plain("blocks.*.mlp_norm.beta", "transformer.h.*.ln_2.bias"),
    Key::plain("blocks.*.mlp.up.weight", "transformer.h.*.mlp.c_fc.weight"),
    Key::plain("blocks.*.mlp.up.bias", "transformer.h.*.mlp.c_fc.bias"),
    Key::plain(
        "blocks.*.mlp.down.weight",
        "transformer.h.*.mlp.c_proj.weight",
    ),
    Key::plain("blocks.*.mlp.down.bias", "transformer.h.*.mlp.c_proj.bias"),
    Key::plain("blocks.*.mtp.enorm.gamma", "transformer.h.*.enorm.weight"),
    Key::plain("blocks.*.mtp.enorm.beta", "transformer.h.*.enorm.bias"),
    Key::plain("blocks.*.mtp.hnorm.gamma", "transformer.h.*.hnorm.weight"),
    Key::plain("blocks.*.mtp.hnorm.beta", "transformer.h.*.hnorm.bias"),
    Key::plain(
        "blocks.*.mtp.eh_proj.weight",
        "transformer.h.*.eh_proj.weight",
    ),
    Key::plain(
        "blocks.*.mtp.norm.gamma",
        "transformer.h.*.shared_head.norm.weight",
    ),
    Key::plain(
        "blocks.*.mtp.norm.beta",
        "transformer.h.*.shared_head.norm.bias",
    ),
];

fn read(json: &HfJson<'_>) -> Result<DecoderConfig, String> {
    json.only("scale_attn_weights", true)?;
    json.only("scale_attn_by_inverse_layer_idx", false)?;
    json.only("reorder_and_upcast_attn", false)?;
    json.only("add_cross_attention", false)?;
    let hidden = json.size("n_embd")?;
    let heads = json.size("n_head")?;
    if heads == 0 || !hidden.is_multiple_of(heads) {
        return Err(format!(
            "`n_embd` {hidden} is not a multiple of `n_head` {heads}"
        ));
    }
    Ok(DecoderConfig {
        vocab: json.size("vocab_size")?,
        hidden,
        ffn: json.optional_size("n_inner")?.unwrap_or(4 * hidden),
        layers: json.layers("n_layer")?,
        heads,
        kv_heads: heads,
        head_dim: hidden / heads,
        max_seq_len: json.size("n_positions")?,
        norm_eps: json.number("layer_norm_epsilon")?,
        activation: activation(json, "activation_function")?,
        tied: json.flag("tie_word_embeddings")?,
        ..template()
    })
}

/// Reads the activation function at `key`. GPT-NeoX has the same names.
pub(super) fn activation(json: &HfJson<'_>, key: &str) -> Result<Activation, String> {
    let name = json.text(key)?;
    match name.as_str() {
        "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
        "gelu" => Ok(Activation::Gelu),
        "relu" => Ok(Activation::Relu),
        _ => Err(format!(
            "`{key}` is {name}; gelu_new, gelu_fast, gelu_pytorch_tanh, gelu and relu are supported"
        )),
    }
}

/// The inverse of [`activation`].
pub(super) fn activation_name(activation: Activation) -> &'static str {
    match activation {
        Activation::Gelu => "gelu",
        Activation::Relu => "relu",
        _ => "gelu_new",
    }
}

fn write(config: &DecoderConfig) -> Value {
    json!({
        "activation_function": activation_name(config.activation),
        "n_embd": config.hidden,
        "n_inner": config.ffn,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_positions": config.max_seq_len,
        "layer_norm_epsilon": config.norm_eps,
    })
}
