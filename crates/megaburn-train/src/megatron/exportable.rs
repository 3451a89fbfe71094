//! Which runs have a counterpart in Megatron-LM.

use megaburn_kernels::RopeScaling;
use megaburn_models::{DecoderConfig, decoder::Experts};
use megaburn_parallel::NormKind;

use crate::config::{
    Dtype, OptimizerName, RopeScalingConfig, TrainConfig, parts_unknown_to_megatron,
};

/// Says why a run has no counterpart in Megatron-LM.
pub(super) fn check(config: &TrainConfig, model: &DecoderConfig) -> Result<(), String> {
    let plain = RopeScalingConfig::default();
    let has_other_scaling = match (model.positions.rotary(), &config.model.rope_scaling) {
        (None, _) => false,
        (Some(rotary), None) => rotary.scaling != RopeScaling::None,
        (Some(_), Some(scaling)) => {
            let factor = scaling.factor;
            *scaling != RopeScalingConfig { factor, ..plain }
        }
    };
    let experts = model.experts.as_ref();
    let has_other_experts = experts.is_some_and(|experts| {
        let mixtral = Experts::new(experts.num, experts.top_k, experts.ffn);
        *experts != mixtral || model.mlp_bias
    });
    let name = config.optimizer.name;
    let parts = parts_unknown_to_megatron(model);
    for (is_other, why) in [
        (
            ![
                [false, false, false],
                [true, false, false],
                [true, true, true],
            ]
            .contains(&[model.qkv_bias, model.output_bias, model.mlp_bias]),
            "Megatron-LM has biases in all linear layers, in those of queries, keys and values, or \
                in none"
                .into(),
        ),
        (
            model.norm == NormKind::Layer && model.qk_norm.is_some(),
            "norms of query and key heads are RMS norms here, and Megatron-LM would make them \
                LayerNorms as the model's other norms"
                .into(),
        ),
        (
            !parts.is_empty(),
            format!(
                "the model has {} unlike Llama and GPT-2, which is not converted",
                parts.join(", ")
            ),
        ),
        (
            name != OptimizerName::AdamW,
            format!("optimizer.name is {name}, and only adamw is converted"),
        ),
        (
            config.train.dtype == Dtype::F16,
            "train.dtype is f16, whose loss scale is not converted".into(),
        ),
        (
            !config.optimizer.groups.is_empty(),
            "optimizer.groups is set, and Megatron-LM has no such groups of parameters".into(),
        ),
        (
            config.train.label_smoothing > 0.0 || config.train.z_loss > 0.0,
            "train.label_smoothing and train.z_loss are no options of Megatron-LM's GPT".into(),
        ),
        (
            model.latent.is_some() || model.mtp_layers > 0,
            "latent attention and multi-token prediction are not converted".into(),
        ),
        (
            model.window.is_some(),
            "model.window is set, and sliding windows are not converted".into(),
        ),
        (
            has_other_scaling,
            "model.rope_scaling is not that of Llama 3.1, the only one of Megatron-LM".into(),
        ),
        (
            has_other_experts,
            "model.experts is other than softmax routing with normalised weights in every layer, \
            without biases, and only that is converted"
                .into(),
        ),
    ] {
        if is_other {
            return Err(why);
        }
    }
    Ok(())
}
