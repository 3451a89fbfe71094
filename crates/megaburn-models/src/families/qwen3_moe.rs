//! Qwen3's mixtures of experts: a Qwen3 with experts in place of its MLPs, in all layers or some.
//!
//! Source: Yang et al., "Qwen3 technical report" (2025), <https://arxiv.org/abs/2505.09388>.

use serde_json::{Value, json};

use super::{Family, FamilySpec, HfJson, llama, qwen3};
use crate::{DecoderConfig, decoder::Experts, hf::Key};

pub(super) const SPEC: FamilySpec = FamilySpec {
    model_type: "qwen3_moe",
    architecture: "Qwen3MoeForCausalLM",
    keys: &[llama::KEYS, qwen3::KEYS, KEYS],
    template,
    read,
    write,
    ..llama::SPEC
};

/// DeepSeek names its experts like this too.
pub(super) const KEYS: &[Key] = &[
    Key::linear("blocks.*.moe.router.weight", &["model.layers.*.mlp.gate.weight"]),
    Key::linear(
        "blocks.*.moe.experts.*.up.weight",
        &[
            "model.layers.*.mlp.experts.*.gate_proj.weight",
            "model.layers.*.mlp.experts.*.up_proj.weight",
        ],
    ),
    Key::linear(
        "blocks.*.moe.experts.*.down.weight",
        &["model.layers.*.mlp.experts.*.down_proj.weight"],
    ),
];

fn template() -> DecoderConfig {
    let parts = qwen3::template();
    // A normalised softmax is what the published ones have.
    let experts = Some(Experts::new(8, 2, parts.ffn / 2));
    DecoderConfig { family: Family::Qwen3Moe, experts, ..parts }
}

fn read(json: &HfJson<'_>) -> Result<DecoderConfig, String> {
    let bias = json.flag("attention_bias", false)?;
    let sizes = llama::read_sizes(json, template(), Some(4))?;
    let used = json.flag("use_sliding_window", false)?;
    let window = json.size_or_null("sliding_window", 4096)?.filter(|_| used);
    // Transformers 5 has another name for it than the published ones.
    let num = json.size_or("num_experts", json.size_or("num_local_experts", 128)?)?;
    let step = json.size_or("decoder_sparse_step", 1)?;
    let mut dense_layers = json.sizes("mlp_only_layers")?;
    if step == 0 || num == 0 {
        return Err(format!(
            "`decoder_sparse_step` {step} and `num_experts` {num} give no experts"
        ));
    }
    dense_layers.extend((0..sizes.layers).filter(|layer| (layer + 1) % step != 0));
    dense_layers.sort_unstable();
    dense_layers.dedup();
    let experts = Experts {
        normalise: json.flag("norm_topk_prob", false)?,
        dense_layers,
        ..Experts::new(
            num,
            json.size_or("num_experts_per_tok", 8)?,
            json.size_or("moe_intermediate_size", 768)?,
        )
    };
    Ok(DecoderConfig { qkv_bias: bias, output_bias: bias, window, experts: Some(experts), ..sizes })
}

fn write(config: &DecoderConfig) -> Value {
    let mut json = llama::write_sizes(config);
    json["attention_bias"] = config.qkv_bias.into();
    json["use_sliding_window"] = config.window.is_some().into();
    json["sliding_window"] = config.window.into();
    if let Some(experts) = &config.experts {
        json["num_experts"] = experts.num.into();
        json["num_experts_per_tok"] = experts.top_k.into();
        json["moe_intermediate_size"] = experts.ffn.into();
        json["norm_topk_prob"] = experts.normalise.into();
        json["decoder_sparse_step"] = 1.into();
        json["mlp_only_layers"] = json!(experts.dense_layers);
    }
    json
}
