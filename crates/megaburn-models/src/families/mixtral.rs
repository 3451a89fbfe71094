//! Mixtral: a Mistral with experts in place of its MLPs, two per token.
//!
//! Source: Jiang et al., "Mixtral of experts" (2024), <https://arxiv.org/abs/2401.04088>.

use serde_json::Value;

use super::{Family, FamilySpec, HfJson, KeyDefault, Meaning, llama, mistral};
use crate::{
    decoder::{DecoderConfig, Experts},
    hf::Key,
};

pub(super) const SPEC: FamilySpec = FamilySpec {
    model_type: "mixtral",
    architecture: "MixtralForCausalLM",
    description: "Mixtral 8x7B and 8x22B.",
    keys: &[llama::KEYS, KEYS],
    defaults: &[DEFAULTS, llama::COMMON],
    template,
    read,
    write,
    ..llama::SPEC
};

fn template() -> DecoderConfig {
    let parts = llama::template();
    let experts = Some(Experts::new(8, 2, parts.ffn));
    DecoderConfig {
        family: Family::MIXTRAL,
        experts,
        ..parts
    }
}

const DEFAULTS: &[KeyDefault] = &[
    KeyDefault::or_nothing("num_key_value_heads", Meaning::Size(8)),
    KeyDefault::same("head_dim", Meaning::Nothing),
    KeyDefault::same("rms_norm_eps", Meaning::Number(1e-5)),
    KeyDefault::same("rope_theta", Meaning::Number(1e6)),
    KeyDefault::same("sliding_window", Meaning::Nothing),
    KeyDefault::same("num_local_experts", Meaning::Size(8)),
    KeyDefault::same("num_experts_per_tok", Meaning::Size(2)),
    KeyDefault::same("router_jitter_noise", Meaning::Number(0.0)),
];

const KEYS: &[Key] = &[
    Key::linear(
        "blocks.*.moe.router.weight",
        &["model.layers.*.block_sparse_moe.gate.weight"],
    ),
    Key::linear(
        "blocks.*.moe.experts.*.up.weight",
        &[
            "model.layers.*.block_sparse_moe.experts.*.w1.weight",
            "model.layers.*.block_sparse_moe.experts.*.w3.weight",
        ],
    ),
    Key::linear(
        "blocks.*.moe.experts.*.down.weight",
        &["model.layers.*.block_sparse_moe.experts.*.w2.weight"],
    ),
];

fn read(json: &HfJson<'_>) -> Result<DecoderConfig, String> {
    // Transformers applies the noise in training only.
    json.only("router_jitter_noise", 0.0)?;
    let config = llama::read_sizes(json, template())?;
    let num = json.size("num_local_experts")?;
    let top_k = json.size("num_experts_per_tok")?;
    let experts = Some(Experts::new(num, top_k, config.ffn));
    Ok(DecoderConfig {
        window: json.optional_size("sliding_window")?,
        experts,
        ..config
    })
}

fn write(config: &DecoderConfig) -> Value {
    let mut json = mistral::write(config);
    let experts = config.experts.as_ref();
    json["intermediate_size"] = experts.map(|experts| experts.ffn).into();
    json["num_local_experts"] = experts.map(|experts| experts.num).into();
    json["num_experts_per_tok"] = experts.map(|experts| experts.top_k).into();
    json
}
