//! Mixtral: a Mistral with experts in place of its MLPs, two a token.
//!
//! Source: Jiang et al., "Mixtral of experts" (2024), <https://arxiv.org/abs/2401.04088>.

use serde_json::Value;

use super::{Family, FamilySpec, HfJson, llama, mistral};
use crate::{DecoderConfig, decoder::Experts, hf::Key};

pub(super) const SPEC: FamilySpec = FamilySpec {
    model_type: "mixtral",
    architecture: "MixtralForCausalLM",
    keys: &[llama::KEYS, KEYS],
    template,
    read,
    write,
    ..llama::SPEC
};

const KEYS: &[Key] = &[
    Key::linear("blocks.*.moe.router.weight", &["model.layers.*.block_sparse_moe.gate.weight"]),
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

fn template() -> DecoderConfig {
    let parts = llama::template();
    let experts = Some(Experts::new(8, 2, parts.ffn));
    DecoderConfig { family: Family::Mixtral, experts, ..parts }
}

fn read(json: &HfJson<'_>) -> Result<DecoderConfig, String> {
    // Transformers' only at training.
    json.only("router_jitter_noise", 0.0)?;
    let config = llama::read_sizes(json, template(), Some(8))?;
    let (num, top_k) =
        (json.size_or("num_local_experts", 8)?, json.size_or("num_experts_per_tok", 2)?);
    let experts = Some(Experts::new(num, top_k, config.ffn));
    Ok(DecoderConfig {
        window: json.size_or_null("sliding_window", 0)?.filter(|w| *w > 0),
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
