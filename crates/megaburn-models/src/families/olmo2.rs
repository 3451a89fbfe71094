//! OLMo 2: norms of the outputs of attention and MLP in place of norms before them, and one norm
//! over all query heads and one over all key heads.
//!
//! Source: OLMo Team, "2 OLMo 2 Furious" (2025), <https://arxiv.org/abs/2501.00656>.

use megaburn_parallel::QkNormKind;
use serde_json::Value;

use super::{Family, FamilySpec, HfJson, KeyDefault, Meaning, llama, qwen3};
use crate::{
    decoder::{DecoderConfig, NormPlacement},
    hf::Key,
};

pub(super) const SPEC: FamilySpec = FamilySpec {
    model_type: "olmo2",
    architecture: "Olmo2ForCausalLM",
    description: "OLMo 2.",
    keys: &[KEYS, qwen3::KEYS, llama::KEYS],
    defaults: &[DEFAULTS, llama::COMMON],
    template,
    read,
    write,
    ..llama::SPEC
};

fn template() -> DecoderConfig {
    DecoderConfig {
        family: Family::OLMO2,
        norm_placement: NormPlacement::Output,
        qk_norm: Some(QkNormKind::Width),
        ..llama::template()
    }
}

const DEFAULTS: &[KeyDefault] = &[
    KeyDefault::same("num_key_value_heads", Meaning::Nothing),
    KeyDefault::same("rms_norm_eps", Meaning::Number(1e-5)),
    KeyDefault::same("attention_bias", Meaning::Flag(false)),
];

const KEYS: &[Key] = &[
    Key::plain(
        "blocks.*.attention_output_norm.gamma",
        "model.layers.*.post_attention_layernorm.weight",
    ),
    Key::plain(
        "blocks.*.mlp_output_norm.gamma",
        "model.layers.*.post_feedforward_layernorm.weight",
    ),
];

fn read(json: &HfJson<'_>) -> Result<DecoderConfig, String> {
    let bias = json.flag("attention_bias")?;
    Ok(DecoderConfig {
        qkv_bias: bias,
        output_bias: bias,
        ..llama::read_sizes(json, template())?
    })
}

fn write(config: &DecoderConfig) -> Value {
    let mut json = llama::write_sizes(config);
    json["attention_bias"] = config.qkv_bias.into();
    json
}
