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

fn template() -> DecoderConfig {
    DecoderConfig {
        family: Family::Gemma3,
        qk_norm: Some(QkNormKind::Head),
        positions: Positions::Rotary(Rotary {
            window_theta: Some(WINDOW_THETA),
            ..Rotary::new(1e6)
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
    KeyDefault::same("rope_theta", Meaning::Number(1e6)),
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
    let by_kind = json.get("rope_parameters").and_then(Value::as_object);
    let kinds = ["full_attention", "sliding_attention"]
        .map(|kind| by_kind.and_then(|by_kind| by_kind.get(kind)));
    let (rotary, window_theta) = match kinds {
        [Some(full), Some(window)] => {
            let window = HfJson::new(window, &[]);
            window.only("rope_type", "default")?;
            (with_scaling(json, full)?, window.number("rope_theta")?)
        }
        [None, None] => (
            json.rotary()?,
            json.optional_number("rope_local_base_freq")?
                .unwrap_or(WINDOW_THETA),
        ),
        _ => {
            return Err(
                "`rope_parameters` has only one of full_attention and sliding_attention".into(),
            );
        }
    };
    config.positions = Positions::Rotary(Rotary {
        window_theta: config.window.map(|_| window_theta),
        ..rotary
    });
    Ok(config)
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
