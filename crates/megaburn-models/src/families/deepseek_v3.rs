//! DeepSeek-V3 and R1: a DeepSeek-V2 whose router uses sigmoid scores and expert biases.
//!
//! Source: DeepSeek-AI, "DeepSeek-V3 technical report" (2024), <https://arxiv.org/abs/2412.19437>.

use serde_json::Value;

use super::{
    Family, FamilySpec, HfJson, KeyDefault, MTP_LAYERS, Meaning, deepseek_v2, llama, qwen3_moe,
};
use crate::{
    decoder::{DecoderConfig, Experts, Mla},
    hf::Key,
};

pub(super) const SPEC: FamilySpec = FamilySpec {
    model_type: "deepseek_v3",
    architecture: "DeepseekV3ForCausalLM",
    description: "DeepSeek-V3 and R1.",
    keys: &[llama::KEYS, qwen3_moe::KEYS, deepseek_v2::KEYS, KEYS],
    defaults: &[DEFAULTS, deepseek_v2::LATENT, llama::COMMON],
    template,
    read,
    write,
    ..llama::SPEC
};

fn template() -> DecoderConfig {
    let parts = deepseek_v2::template();
    let how = |experts: Experts| Experts {
        sigmoid: true,
        normalise: true,
        scale: 2.5,
        groups: Some([4, 2, 2]),
        bias: true,
        ..experts
    };
    let experts = parts.experts.map(how);
    DecoderConfig {
        family: Family::DEEPSEEK_V3,
        experts,
        ..parts
    }
}

const KEYS: &[Key] = &[Key::buffer(
    "blocks.*.moe.router.bias",
    "model.layers.*.mlp.gate.e_score_correction_bias",
)];

const DEFAULTS: &[KeyDefault] = &[
    KeyDefault::or_nothing("num_key_value_heads", Meaning::Size(128)),
    KeyDefault::or_false("norm_topk_prob", true),
    KeyDefault::or_false("rope_interleave", true),
    KeyDefault::or_nothing("n_group", Meaning::Size(8)),
    KeyDefault::or_nothing("topk_group", Meaning::Size(4)),
    KeyDefault::or_nothing("num_experts_per_tok", Meaning::Size(8)),
    KeyDefault::same("moe_intermediate_size", Meaning::Size(2048)),
    KeyDefault::same("n_shared_experts", Meaning::Size(1)),
    KeyDefault::same("n_routed_experts", Meaning::Size(256)),
    KeyDefault::same("routed_scaling_factor", Meaning::Number(2.5)),
    KeyDefault::or_nothing("first_k_dense_replace", Meaning::Size(3)),
    KeyDefault::or_nothing("v_head_dim", Meaning::Size(128)),
    KeyDefault::or_nothing(MTP_LAYERS, Meaning::Size(1)),
];

fn read(json: &HfJson<'_>) -> Result<DecoderConfig, String> {
    // DeepSeek's own code reads these keys, Transformers does not.
    json.only("scoring_func", "sigmoid")?;
    json.only("topk_method", "noaux_tc")?;
    let config = deepseek_v2::read_sizes(json, template())?;
    let groups = match [json.size("n_group")?, json.size("topk_group")?] {
        [1, 1] => None,
        // The score of a group is the sum of the scores of its two best experts.
        [groups, kept] => Some([groups, kept, 2]),
    };
    let how = Experts {
        sigmoid: true,
        normalise: json.flag("norm_topk_prob")?,
        groups,
        bias: true,
        ..Experts::new(1, 1, 1)
    };
    let experts = Some(deepseek_v2::read_experts(json, config.layers, how)?);
    let interleaved = json.flag("rope_interleave")?;
    let latent = config.latent.map(|latent| Mla {
        interleaved,
        ..latent
    });
    Ok(DecoderConfig {
        experts,
        latent,
        ..config
    })
}

fn write(config: &DecoderConfig) -> Value {
    let mut json = deepseek_v2::write_sizes(config);
    let groups = config.experts.as_ref().and_then(|experts| experts.groups);
    let [groups, kept, _] = groups.unwrap_or([1, 1, 1]);
    json["n_group"] = groups.into();
    json["topk_group"] = kept.into();
    json["rope_interleave"] = config
        .latent
        .as_ref()
        .is_none_or(|of| of.interleaved)
        .into();
    // If the key is absent, Transformers assumes 1.
    json["num_nextn_predict_layers"] = config.mtp_layers.into();
    json
}
