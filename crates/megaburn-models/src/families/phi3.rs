//! Phi-3 and Phi-4: a Llama whose queries, keys and values are one tensor, and gate and up another.
//!
//! Source: Abdin et al., "Phi-3 technical report" (2024), <https://arxiv.org/abs/2404.14219>.

use megaburn_kernels::RopeScaling;
use serde_json::Value;

use super::{Family, FamilySpec, HfJson, KeyDefault, Meaning, llama, rotary::write_percent};
use crate::{
    decoder::{DecoderConfig, Positions},
    hf::Key,
};

pub(super) const SPEC: FamilySpec = FamilySpec {
    model_type: "phi3",
    architecture: "Phi3ForCausalLM",
    description: "Phi-3 and Phi-4.",
    keys: &[KEYS, llama::KEYS],
    defaults: &[DEFAULTS, llama::COMMON],
    template,
    read,
    write,
    ..llama::SPEC
};

fn template() -> DecoderConfig {
    DecoderConfig {
        family: Family::PHI3,
        ..llama::template()
    }
}

const DEFAULTS: &[KeyDefault] = &[
    KeyDefault::same("num_key_value_heads", Meaning::Nothing),
    KeyDefault::same("rms_norm_eps", Meaning::Number(1e-5)),
    KeyDefault::same("sliding_window", Meaning::Nothing),
    KeyDefault::same("original_max_position_embeddings", Meaning::Size(4096)),
];

const KEYS: &[Key] = &[
    Key::linear(
        "blocks.*.attention.qkv.weight",
        &["model.layers.*.self_attn.qkv_proj.weight"],
    ),
    Key::linear(
        "blocks.*.mlp.up.weight",
        &["model.layers.*.mlp.gate_up_proj.weight"],
    ),
];

fn read(json: &HfJson<'_>) -> Result<DecoderConfig, String> {
    json.only("hidden_act", "silu")?;
    let rotary = json.partial_rotary(1.0)?;
    if !matches!(rotary.scaling, RopeScaling::None | RopeScaling::Long(_)) {
        return Err("the rope scaling of Phi-3 can only be `default` or `longrope`".into());
    }
    Ok(DecoderConfig {
        window: json.optional_size("sliding_window")?,
        positions: Positions::Rotary(rotary),
        norm_eps: json.number("rms_norm_eps")?,
        ..llama::read_plain_sizes(json, template())?
    })
}

fn write(config: &DecoderConfig) -> Value {
    let mut json = llama::write_sizes(config);
    json["sliding_window"] = config.window.into();
    write_percent(&config.positions, &mut json);
    if let Some(RopeScaling::Long(long)) = config.positions.rotary().map(|of| &of.scaling) {
        json["original_max_position_embeddings"] = long.original_max_position.into();
    }
    json
}
