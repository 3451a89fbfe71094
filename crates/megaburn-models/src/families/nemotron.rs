//! Nemotron: LayerNorm with a zero-centred scale, squared ReLU, and rotary positions in half of each
//! head.
//!
//! Source: Parmar et al., "Nemotron-4 15B technical report" (2024),
//! <https://arxiv.org/abs/2402.16819>.

use megaburn_parallel::{Activation, NormKind};
use serde_json::Value;

use super::{
    Family, FamilySpec, HfJson, KeyDefault, Meaning, llama, rotary::write_percent, starcoder2,
};
use crate::{
    decoder::{DecoderConfig, Positions, Rotary},
    hf::Key,
};

pub(super) const SPEC: FamilySpec = FamilySpec {
    model_type: "nemotron",
    architecture: "NemotronForCausalLM",
    description: "Nemotron-3 and 4, Minitron.",
    keys: &[KEYS, starcoder2::NORM_BIASES, llama::KEYS],
    defaults: &[DEFAULTS, llama::COMMON],
    template,
    read,
    write,
    ..llama::SPEC
};

/// The fraction of a head that is rotated, unless `config.json` has another.
const PERCENT: f64 = 0.5;

fn template() -> DecoderConfig {
    DecoderConfig {
        family: Family::NEMOTRON,
        norm: NormKind::Layer,
        zero_centered_gamma: true,
        activation: Activation::SquaredRelu,
        positions: Positions::Rotary(Rotary {
            percent: PERCENT,
            ..Rotary::new(10_000.0)
        }),
        ..llama::template()
    }
}

const DEFAULTS: &[KeyDefault] = &[
    KeyDefault::same("num_key_value_heads", Meaning::Nothing),
    KeyDefault::same("head_dim", Meaning::Nothing),
    KeyDefault::same("hidden_act", Meaning::Text("relu2")),
    KeyDefault::same("norm_eps", Meaning::Number(1e-5)),
    KeyDefault::same("attention_bias", Meaning::Flag(false)),
    KeyDefault::same("mlp_bias", Meaning::Flag(false)),
];

const KEYS: &[Key] = &[
    Key::linear(
        "blocks.*.mlp.up.weight",
        &["model.layers.*.mlp.up_proj.weight"],
    ),
    Key::plain("blocks.*.mlp.up.bias", "model.layers.*.mlp.up_proj.bias"),
];

fn read(json: &HfJson<'_>) -> Result<DecoderConfig, String> {
    json.only("hidden_act", "relu2")?;
    let bias = json.flag("attention_bias")?;
    // The name of the published files. Transformers' class ignores it.
    let named = json.optional_number("rope_percent")?;
    let rotary = json.partial_rotary(named.unwrap_or(PERCENT))?;
    let percent = rotary.percent;
    if let Some(named) = named.filter(|named| *named != percent) {
        return Err(format!(
            "`rope_percent` is {named}, but `partial_rotary_factor` is {percent}: make them equal"
        ));
    }
    Ok(DecoderConfig {
        qkv_bias: bias,
        output_bias: bias,
        mlp_bias: json.flag("mlp_bias")?,
        norm_eps: json.number("norm_eps")?,
        positions: Positions::Rotary(rotary),
        ..llama::read_plain_sizes(json, template())?
    })
}

fn write(config: &DecoderConfig) -> Value {
    let mut json = llama::write_sizes(config);
    json["hidden_act"] = "relu2".into();
    json["attention_bias"] = config.qkv_bias.into();
    json["mlp_bias"] = config.mlp_bias.into();
    llama::rename(&mut json, "rms_norm_eps", "norm_eps");
    write_percent(&config.positions, &mut json);
    json
}
