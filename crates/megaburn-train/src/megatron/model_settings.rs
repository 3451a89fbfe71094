//! The section `[model]` that describes a model of Megatron-LM.

use megaburn_models::Family;
use megaburn_torch::pickle::Value;

use super::{args::Args, error::MegatronError};
use crate::config::{ExpertsConfig, LayerPattern, ModelConfig, RopeScalingConfig};

/// Why an argument is refused that changes what the model computes.
const NOT_COMPUTED: &str = "megaburn has no layer that computes this, so the run can only continue \
    in Megatron-LM";

/// Switches with which a model computes something that megaburn does not.
const OFF: &[&str] = &[
    "multi_latent_attention",
    "rotary_interleaved",
    "apply_residual_connection_post_layernorm",
    "squared_relu",
    "quick_geglu",
    "openai_gelu",
    "apply_layernorm_1p",
    "layernorm_zero_centered_gamma",
    "qk_clip",
    "qk_l2_norm",
    "attention_output_gate",
    "use_mup",
    "is_hybrid_model",
    "enable_mhc_connections",
    "heterogeneous_block_specs",
];

/// Arguments with which, if they are set, a model computes something that megaburn does not.
const UNSET: &[&str] = &[
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
    "experimental_attention_variant",
    "linear_attention_freq",
    "hybrid_override_pattern",
    "hybrid_layer_pattern",
    "window_size",
    "no_rope_freq",
    "mrope_section",
    "softmax_scale",
    "activation_func_clamp_value",
    "rotary_seq_len_interpolation_factor",
];

/// Switches with which experts compute something that megaburn does not.
const EXPERTS_OFF: &[&str] = &[
    "moe_router_pre_softmax",
    "moe_router_enable_expert_bias",
    "moe_shared_expert_gate",
    "moe_apply_probs_on_input",
];

/// Arguments with which, if they are set, experts compute something that megaburn does not.
const EXPERTS_UNSET: &[&str] = &[
    "moe_shared_expert_intermediate_size",
    "moe_latent_size",
    "moe_router_num_groups",
    "moe_router_topk_limited_devices",
    "moe_router_topk_scaling_factor",
    "moe_input_jitter_eps",
    "moe_expert_rank_capacity_factor",
    "moe_mlp_glu_interleave_size",
    "moe_router_force_biased",
];

/// The model of a run, with `vocab` token ids.
///
/// # Errors
/// An argument is missing, or describes a model that megaburn does not have.
pub(super) fn model(args: Args, vocab: usize) -> Result<ModelConfig, MegatronError> {
    args.off(OFF, NOT_COMPUTED)?;
    args.unset(UNSET, NOT_COMPUTED)?;
    args.only_number(
        "mtp_num_layers",
        0.0,
        "multi-token prediction is not converted",
    )?;
    args.only_number("glu_linear_offset", 0.0, NOT_COMPUTED)?;
    args.only_number("rotary_percent", 1.0, NOT_COMPUTED)?;
    args.only_text("softmax_type", &["vanilla"], NOT_COMPUTED)?;
    check_spec(args)?;
    let family = family(args)?;
    let heads = args.size("num_attention_heads")?;
    let kv_heads = match args.flag("group_query_attention")? {
        true => args.size("num_query_groups")?,
        false => heads,
    };
    let ffn = args.size("ffn_hidden_size")?;
    let expert_ffn = args.optional_size("moe_ffn_hidden_size")?.unwrap_or(ffn);
    let norm_eps = match args.optional_number("norm_epsilon")? {
        Some(eps) => eps,
        None => args.number("layernorm_epsilon")?,
    };
    let defaults = ModelConfig::default();
    Ok(ModelConfig {
        family,
        hidden: args.size("hidden_size")?,
        ffn: if family == Family::MIXTRAL {
            expert_ffn
        } else {
            ffn
        },
        layers: args.size("num_layers")?,
        heads,
        kv_heads,
        head_dim: args.optional_size("kv_channels")?,
        vocab: Some(vocab),
        rope_theta: if family == Family::GPT2 {
            defaults.rope_theta
        } else {
            args.number("rotary_base")?
        },
        norm_eps,
        tied: !args.flag("untie_embeddings_and_output_weights")?,
        experts: match has_experts(args)? {
            false => None,
            true => Some(ExpertsConfig {
                num: args.size("num_experts")?,
                top_k: args.size("moe_router_topk")?,
                ffn: Some(expert_ffn),
                normalise: Some(true),
                layer_freq: LayerPattern::Every(1),
                ..ExpertsConfig::default()
            }),
        },
        rope_scaling: rope_scaling(args)?,
        ..defaults
    })
}

/// Refuses layers that a function of the run made: `--spec` other than `local`.
fn check_spec(args: Args) -> Result<(), MegatronError> {
    let name = "spec";
    let is_known = args.get(name).is_none_or(|spec| {
        let texts = spec.sequence();
        texts.is_some_and(|texts| texts.iter().all(|text| text.as_str() == Some("local")))
    });
    match is_known {
        true => Ok(()),
        false => Err(args.refused(name, NOT_COMPUTED)),
    }
}

/// Whether the layers of the model have experts.
pub(super) fn has_experts(args: Args) -> Result<bool, MegatronError> {
    Ok(args.optional_size("num_experts")?.is_some())
}

/// The family whose layers are those of the run.
fn family(args: Args) -> Result<Family, MegatronError> {
    let positions = args.text("position_embedding_type")?;
    let has_biases = match args.get("add_bias_linear") {
        Some(_) => args.flag("add_bias_linear")?,
        None => return Err(args.missing("argument `add_bias_linear`", "it decides on the biases")),
    };
    let experts = has_experts(args)?;
    if positions == "learned_absolute" {
        let why = "with learned positions, megaburn has the layers of GPT-2: LayerNorm, GELU in \
            the approximation by tanh (--bias-gelu-fusion), biases, no grouped queries, no experts";
        args.only_text("normalization", &["LayerNorm"], why)?;
        args.off(&["swiglu", "qk_layernorm", "group_query_attention"], why)?;
        if experts {
            return Err(args.refused("num_experts", why));
        }
        for name in ["add_bias_linear", "bias_gelu_fusion"] {
            if !args.flag(name)? {
                return Err(args.refused(name, why));
            }
        }
        let (seq, most) = (
            args.size("seq_length")?,
            args.size("max_position_embeddings")?,
        );
        if seq != most {
            let why = format!(
                "it must be seq_length, {seq}, because a GPT-2 of megaburn has a position for each \
                token of a sample"
            );
            return Err(args.refused("max_position_embeddings", why));
        }
        return Ok(Family::GPT2);
    }
    let why = "megaburn has learned_absolute and rope";
    args.only_text("position_embedding_type", &["rope"], why)?;
    let why = "with rotary positions, megaburn has the layers of Llama, Qwen and Mixtral: RMSNorm, \
        SwiGLU, no biases of linear layers";
    if args.text("normalization")? != "RMSNorm" {
        return Err(args.refused("normalization", why));
    }
    if !args.flag("swiglu")? {
        return Err(args.refused("swiglu", why));
    }
    if has_biases {
        return Err(args.refused("add_bias_linear", why));
    }
    if experts {
        check_experts(args)?;
    }
    let qk_norm = args.flag("qk_layernorm")?;
    let qkv_bias = args.flag("add_qkv_bias")?;
    match (experts, qk_norm, qkv_bias) {
        (false, false, false) => Ok(Family::LLAMA),
        (false, false, true) => Ok(Family::QWEN2),
        (false, true, false) => Ok(Family::QWEN3),
        (true, false, false) => Ok(Family::MIXTRAL),
        (true, true, false) => Ok(Family::QWEN3_MOE),
        (_, _, true) => {
            let why = "megaburn has biases of queries, keys and values without norms of heads and \
                without experts only";
            Err(args.refused("add_qkv_bias", why))
        }
    }
}

fn check_experts(args: Args) -> Result<(), MegatronError> {
    args.off(EXPERTS_OFF, NOT_COMPUTED)?;
    args.unset(EXPERTS_UNSET, NOT_COMPUTED)?;
    args.only_text("moe_router_score_function", &["softmax"], NOT_COMPUTED)?;
    let is_one = args.get("moe_layer_freq").is_none_or(|freq| {
        let is_one = |value: Value| value.as_i64() == Some(1);
        is_one(freq) || freq.sequence().is_some_and(|all| all.iter().all(is_one))
    });
    match is_one {
        true => Ok(()),
        false => Err(args.refused("moe_layer_freq", "every layer must have experts")),
    }
}

/// The scaling of rotary positions, which is that of Llama 3.1.
///
/// Source: Megatron-Core, `models/common/embeddings/rotary_pos_embedding.py`, `_apply_scaling`.
fn rope_scaling(args: Args) -> Result<Option<RopeScalingConfig>, MegatronError> {
    if !args.flag("use_rope_scaling")? {
        return Ok(None);
    }
    Ok(Some(RopeScalingConfig {
        factor: args.number("rope_scaling_factor")?,
        ..RopeScalingConfig::default()
    }))
}
