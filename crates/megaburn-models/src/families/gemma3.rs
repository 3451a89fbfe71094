//! Gemma 3, the text model: a Gemma 2 with norms of query and key heads in place of soft caps, whose
//! layers with a sliding window rotate by frequencies of their own.
//!
//! Source: Gemma Team, "Gemma 3 technical report" (2025), <https://arxiv.org/abs/2503.19786>.

use megaburn_parallel::QkNormKind;
use serde_json::{Value, json};

use super::{
    Family, FamilySpec, HfJson, KeyDefault, Meaning, gemma2, llama, qwen3,
    rotary::{rope_parameters, with_scaling},
};
use crate::decoder::{DecoderConfig, Positions, Rotary};

pub(super) const SPEC: FamilySpec = FamilySpec {
    model_type: "gemma3_text",
    architecture: "Gemma3ForCausalLM",
    description: "Gemma 3, the text model.",
    keys: &[gemma2::KEYS, qwen3::KEYS, llama::KEYS],
    defaults: &[DEFAULTS, gemma2::COMMON, llama::COMMON],
    template,
    follow,
    read,
    write,
    ..llama::SPEC
};

/// The base of the rotary frequencies of layers with a window, unless `config.json` has another.
const WINDOW_THETA: f64 = 10_000.0;

/// The base of the other layers.
const THETA: f64 = 1e6;

fn template() -> DecoderConfig {
    DecoderConfig {
        family: Family::GEMMA3,
        qk_norm: Some(QkNormKind::Head),
        positions: Positions::Rotary(Rotary {
            window_theta: Some(WINDOW_THETA),
            ..Rotary::new(THETA)
        }),
        window: Some(1024),
        ..gemma2::common_template()
    }
}

/// Every sixth layer has no window.
fn follow(config: &mut DecoderConfig) {
    gemma2::scale_embeddings(config);
    config.full_layers = every(6, config.layers);
}

/// The last of each `pattern` layers, which have no window.
fn every(pattern: usize, layers: usize) -> Vec<usize> {
    (0..layers)
        .filter(|layer| (layer + 1).is_multiple_of(pattern))
        .collect()
}

const DEFAULTS: &[KeyDefault] = &[
    KeyDefault::same("final_logit_softcapping", Meaning::Nothing),
    KeyDefault::same("attn_logit_softcapping", Meaning::Nothing),
    KeyDefault::same("rope_theta", Meaning::Number(THETA)),
    KeyDefault::or_false("use_bidirectional_attention", false),
];

fn read(json: &HfJson<'_>) -> Result<DecoderConfig, String> {
    let mut config = gemma2::read_common(json, template(), follow)?;
    // The published files have the pattern in place of `layer_types`.
    if json.get("layer_types").is_none()
        && let Some(pattern) = json.optional_size("sliding_window_pattern")?
        && config.window.is_some()
    {
        config.full_layers = every(pattern, config.layers);
    }
    // Transformers does not cap scores, whatever the file says.
    config.attention_soft_cap = None;
    let (rotary, window_theta) = match json.get("rope_parameters") {
        None => {
            let window_theta = json.optional_number("rope_local_base_freq")?;
            (json.rotary()?, window_theta)
        }
        Some(by_kind) => by_kind_of_layer(json, by_kind)?,
    };
    let window_theta = window_theta.unwrap_or(WINDOW_THETA);
    config.positions = Positions::Rotary(Rotary {
        window_theta: config.window.map(|_| window_theta),
        ..rotary
    });
    Ok(config)
}

/// The rotary positions of `rope_parameters`, which has an object for each kind of layer, and the
/// base of the frequencies of layers with a window.
fn by_kind_of_layer(json: &HfJson<'_>, by_kind: &Value) -> Result<(Rotary, Option<f64>), String> {
    let kinds = ["full_attention", "sliding_attention"];
    if kinds.iter().all(|kind| by_kind[kind].is_null()) {
        return Err(format!(
            "`rope_parameters` is {by_kind}, but Gemma 3 has an object for each of full_attention \
            and sliding_attention there"
        ));
    }
    if let Some(scaling) = json.get("rope_scaling") {
        return Err(format!(
            "`rope_scaling` is {scaling} in addition to `rope_parameters`: remove one of them"
        ));
    }
    let empty = json!({});
    let [full, window] = kinds.map(|kind| match &by_kind[kind] {
        Value::Null => &empty,
        found => found,
    });
    let of_window = HfJson::new(window, &[]);
    of_window.only("rope_type", "default")?;
    Ok((
        with_scaling(json, full, THETA)?,
        of_window.optional_number("rope_theta")?,
    ))
}

fn write(config: &DecoderConfig) -> Value {
    let mut json = gemma2::write_common(config);
    let rotary = config.positions.rotary();
    let window_theta = rotary.and_then(|rotary| rotary.window_theta);
    json["rope_parameters"] = json!({
        "full_attention": rope_parameters(&config.positions),
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": window_theta.unwrap_or(WINDOW_THETA),
        },
    });
    json
}
