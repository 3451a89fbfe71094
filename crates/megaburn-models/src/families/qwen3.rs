//! Qwen3: a Llama that normalises each query and key head; the size of its heads is independent of
//! the width.
//!
//! Source: Yang et al., "Qwen3 technical report" (2025).

use megaburn_parallel::QkNormKind;
use serde_json::Value;

use super::{Family, FamilySpec, HfJson, KeyDefault, Meaning, llama, qwen2};
use crate::{decoder::DecoderConfig, hf::Key};

pub(super) const SPEC: FamilySpec = FamilySpec {
    model_type: "qwen3",
    architecture: "Qwen3ForCausalLM",
    description: "Qwen3, dense.",
    keys: &[llama::KEYS, KEYS],
    defaults: &[DEFAULTS, qwen2::DEFAULTS, llama::COMMON],
    template,
    read,
    write,
    ..llama::SPEC
};

pub(super) fn template() -> DecoderConfig {
    DecoderConfig {
        family: Family::QWEN3,
        qk_norm: Some(QkNormKind::Head),
        norm_eps: 1e-6,
        ..llama::template()
    }
}

/// The names of the norms of heads; the mixture-of-experts models have the same.
pub(super) const KEYS: &[Key] = &[
    Key::plain(
        "blocks.*.attention.q_norm.gamma",
        "model.layers.*.self_attn.q_norm.weight",
    ),
    Key::plain(
        "blocks.*.attention.k_norm.gamma",
        "model.layers.*.self_attn.k_norm.weight",
    ),
];

const DEFAULTS: &[KeyDefault] = &[
    // Heads times their size need not be the width.
    KeyDefault::same("head_dim", Meaning::Size(128)),
    KeyDefault::same("attention_bias", Meaning::Flag(false)),
];

fn read(json: &HfJson<'_>) -> Result<DecoderConfig, String> {
    let bias = json.flag("attention_bias")?;
    let sizes = llama::read_sizes(json, template())?;
    let config = DecoderConfig {
        qkv_bias: bias,
        output_bias: bias,
        ..sizes
    };
    qwen2::with_window(json, config)
}

fn write(config: &DecoderConfig) -> Value {
    let mut json = llama::write_sizes(config);
    json["attention_bias"] = config.qkv_bias.into();
    qwen2::write_window(config, &mut json);
    json
}
