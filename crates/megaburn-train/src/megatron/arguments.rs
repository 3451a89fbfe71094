//! The arguments of a run as Megatron-LM has them.

use megaburn_models::{Family, decoder::Positions};
use megaburn_optim::{Decay, WsdStyle};
use megaburn_parallel::DropPolicy;
use megaburn_torch::pickle::Tree;

use super::{
    dict::{Dict, int},
    exported_run::{Rates, Run, decay_style, weight_decay_style},
};
use crate::config::{AmaxCompute, Dtype, PrecisionRecipe};

/// The `argparse.Namespace`: the arguments of the original run, if there was one, with what the run
/// has now.
pub(super) fn arguments(run: &Run, rates: &Rates) -> Tree {
    let class = Tree::global("argparse", "Namespace");
    let mut args = run.args.clone();
    of_model(run, &mut args);
    of_experts(run, &mut args);
    of_training(run, &mut args);
    of_precision(run, &mut args);
    of_optimizer(run, rates, &mut args);
    for name in [
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_tensor_parallel_size",
    ] {
        args.set_default(name, 1);
    }
    args.set_default("transformer_impl", "transformer_engine");
    args.set("expert_model_parallel_size", int(run.ep));
    args.set_default("skipped_train_samples", 0);
    args.set_default("ckpt_format", "torch_dist");
    Tree::Object {
        class: Box::new(class),
        state: Some(Box::new(args.tree())),
    }
}

fn of_model(run: &Run, args: &mut Dict) {
    let model = run.model;
    let is_gpt2 = model.family == Family::GPT2;
    args.set("num_layers", int(model.layers));
    args.set("hidden_size", int(model.hidden));
    args.set("num_attention_heads", int(model.heads));
    args.set("kv_channels", int(model.head_dim));
    args.set("group_query_attention", model.kv_heads != model.heads);
    if model.kv_heads != model.heads {
        args.set("num_query_groups", int(model.kv_heads));
    }
    match &model.positions {
        // A model with ALiBi or a relative bias is not exported.
        Positions::None | Positions::Alibi(_) | Positions::Relative(_) => {
            args.set("position_embedding_type", "none")
        }
        Positions::Learned => {
            args.set("position_embedding_type", "learned_absolute");
            args.set("max_position_embeddings", int(model.max_seq_len));
        }
        Positions::Rotary(rotary) => {
            args.set("position_embedding_type", "rope");
            args.set_default("max_position_embeddings", int(model.max_seq_len));
            args.set("rotary_base", number(rotary.theta));
            args.set_default("rotary_percent", 1.0);
        }
    }
    if let Some(scaling) = &run.config.model.rope_scaling {
        args.set("rope_scaling_factor", scaling.factor);
    }
    args.set("use_rope_scaling", run.config.model.rope_scaling.is_some());
    args.set(
        "normalization",
        if is_gpt2 { "LayerNorm" } else { "RMSNorm" },
    );
    args.set("norm_epsilon", model.norm_eps);
    args.set("swiglu", model.activation.is_gated());
    args.set("bias_gelu_fusion", is_gpt2);
    args.set("add_bias_linear", model.mlp_bias);
    args.set("add_qkv_bias", model.qkv_bias && !model.mlp_bias);
    args.set("qk_layernorm", model.qk_norm.is_some());
    // 0.02 is the default there too.
    if model.init_std != 0.02 {
        args.set("init_method_std", model.init_std);
    }
    args.set("untie_embeddings_and_output_weights", !model.tied);
    args.set("padded_vocab_size", int(run.padded_vocab));
    args.set_default("make_vocab_size_divisible_by", 128);
}

fn of_experts(run: &Run, args: &mut Dict) {
    let model = run.model;
    let Some(experts) = &model.experts else {
        args.set("ffn_hidden_size", int(model.ffn));
        args.set("num_experts", Tree::None);
        return;
    };
    // Of Mixtral, the width of the MLP is that of an expert.
    args.set_default("ffn_hidden_size", int(model.ffn));
    args.set("num_experts", int(experts.num));
    args.set("moe_router_topk", int(experts.top_k));
    args.set("moe_ffn_hidden_size", int(experts.ffn));
    args.set_default("moe_layer_freq", 1);
    let moe = &run.config.moe;
    let mut losses: Vec<(&str, f64)> = [
        ("aux_loss", moe.aux_loss),
        ("seq_aux_loss", moe.seq_aux_loss),
        ("global_aux_loss", moe.global_aux_loss),
    ]
    .into_iter()
    .filter(|(_, coefficient)| *coefficient > 0.0)
    .collect();
    if moe.sinkhorn {
        losses.push(("sinkhorn", 0.0));
    }
    match losses.as_slice() {
        [] => args.set("moe_aux_loss_coeff", 0.0),
        [(kind, coefficient)] => {
            args.set("moe_router_load_balancing_type", *kind);
            args.set("moe_aux_loss_coeff", *coefficient);
        }
        several => {
            let kinds = several.iter().map(|(kind, _)| Tree::from(*kind)).collect();
            let coefficients = several.iter().map(|(_, of)| Tree::Float(*of)).collect();
            args.set("moe_router_load_balancing_type", Tree::List(kinds));
            args.set("moe_aux_loss_coeff", Tree::List(coefficients));
        }
    }
    let z_loss = (moe.z_loss > 0.0).then_some(moe.z_loss);
    args.set("moe_z_loss_coeff", optional(z_loss));
    args.set("moe_expert_capacity_factor", optional(moe.capacity_factor));
    let has_capacity = moe.capacity_factor.is_some();
    args.set(
        "moe_token_drop_policy",
        match moe.drop_policy {
            DropPolicy::Position if has_capacity => "position",
            _ => "probs",
        },
    );
    args.set(
        "moe_pad_expert_input_to_capacity",
        has_capacity && moe.pad_to_capacity,
    );
    args.set("moe_router_force_load_balancing", moe.force_balance);
}

fn of_training(run: &Run, args: &mut Dict) {
    let (train, data) = (&run.config.train, &run.config.data);
    let is_bf16 = train.dtype == Dtype::Bf16;
    args.set("bf16", is_bf16);
    args.set("fp16", false);
    let dtype = if is_bf16 { "bfloat16" } else { "float32" };
    args.set("params_dtype", Tree::global("torch", dtype));
    args.set("hidden_dropout", train.hidden_dropout);
    args.set("attention_dropout", train.attention_dropout);
    args.set("seq_length", int(data.seq_len));
    args.set("micro_batch_size", int(train.micro_batch));
    args.set("global_batch_size", int(train.global_batch));
    let ramp = train.batch_ramp.as_ref().map(|ramp| {
        // Megatron-LM's parser leaves them strings.
        let numbers = [
            ramp.start.to_string(),
            ramp.increment.to_string(),
            ramp.samples.to_string(),
        ];
        Tree::List(numbers.map(Tree::Str).to_vec())
    });
    args.set("rampup_batch_size", ramp.unwrap_or(Tree::None));
    args.set("train_iters", int(train.steps));
    args.set("consumed_train_samples", int(run.progress.consumed_samples));
    args.set("seed", int(run.config.run.seed));
    args.set("eod_mask_loss", data.eod_mask_loss);
    if let Some(split) = &data.split {
        args.set("split", split.as_str());
    }
}

fn of_precision(run: &Run, args: &mut Dict) {
    let precision = &run.config.precision.at_step(run.progress.step + 1);
    let (recipe, format) = (precision.recipe, precision.resolved_format());
    let is_fp4 = recipe == PrecisionRecipe::Nvfp4;
    let is_fp8 = recipe != PrecisionRecipe::Bf16 && !is_fp4;
    for (name, is_used) in [("fp8", is_fp8), ("fp4", is_fp4)] {
        if !is_used && args.get(name).is_some() {
            args.set(name, Tree::None);
        }
    }
    if is_fp4 {
        args.set("fp4", "e2m1");
        args.set("fp4_recipe", "nvfp4");
    } else if is_fp8 {
        args.set("fp8", format.to_string().as_str());
        args.set("fp8_recipe", recipe.to_string().as_str());
        args.set("fp8_margin", int(precision.margin as usize));
        args.set("fp8_amax_history_len", int(precision.amax_history_len));
        let compute = match precision.amax_compute {
            AmaxCompute::Max => "max",
            AmaxCompute::MostRecent => "most_recent",
        };
        args.set("fp8_amax_compute_algo", compute);
        if precision.fp8_param_gather || args.get("fp8_param_gather").is_some() {
            args.set("fp8_param_gather", precision.fp8_param_gather);
        }
    } else {
        return;
    }
    let start = precision.num_layers_at_start_in_bf16;
    let end = precision.num_layers_at_end_in_bf16;
    args.set("first_last_layers_bf16", start + end > 0);
    args.set("num_layers_at_start_in_bf16", int(start));
    args.set("num_layers_at_end_in_bf16", int(end));
}

fn of_optimizer(run: &Run, rates: &Rates, args: &mut Dict) {
    let optimizer = &run.config.optimizer;
    args.set("optimizer", "adam");
    args.set("lr", optimizer.lr);
    args.set("min_lr", optimizer.min_lr);
    args.set("lr_warmup_init", optimizer.init_lr);
    args.set("lr_decay_style", decay_style(rates.lr.decay));
    if let Decay::Wsd { samples, style } = rates.lr.decay {
        let batch = run.config.train.global_batch as u64;
        args.set("lr_wsd_decay_style", wsd_style(style));
        if samples.is_multiple_of(batch) {
            args.set("lr_wsd_decay_iters", int(samples / batch));
        } else {
            args.set("lr_wsd_decay_samples", int(samples));
        }
    }
    let decay = &rates.weight_decay;
    args.set("weight_decay", decay.start);
    args.set("start_weight_decay", decay.start);
    args.set("end_weight_decay", decay.end);
    if decay.start != decay.end {
        args.set("weight_decay_incr_style", weight_decay_style(decay.style));
    }
    if let Some(lr) = optimizer.decoupled_lr {
        args.set("decoupled_lr", lr);
        args.set("decoupled_min_lr", rates.decoupled_lr.min);
    }
    args.set("clip_grad", optimizer.clip_grad);
    if let Some(clip) = optimizer.clips_queries_and_keys() {
        args.set("qk_clip", true);
        args.set("qk_clip_alpha", clip.alpha);
        args.set("qk_clip_threshold", clip.threshold);
    }
    args.set("adam_beta1", optimizer.beta1);
    args.set("adam_beta2", optimizer.beta2);
    args.set("adam_eps", optimizer.eps);
    args.set("use_distributed_optimizer", true);
    args.set(
        "accumulate_allreduce_grads_in_fp32",
        optimizer.main_grads_dtype == Dtype::F32,
    );
}

/// Megatron-LM's name of the shape of the final decay.
fn wsd_style(style: WsdStyle) -> &'static str {
    match style {
        WsdStyle::Exponential => "exponential",
        WsdStyle::Linear => "linear",
        WsdStyle::Cosine => "cosine",
        WsdStyle::MinusSqrt => "minus_sqrt",
    }
}

/// A number that may not be set.
fn optional(number: Option<f64>) -> Tree {
    number.map_or(Tree::None, Tree::Float)
}

/// An integer, if the number has no fraction.
fn number(number: f64) -> Tree {
    if number.fract() == 0.0 && number.abs() < 2f64.powi(53) {
        Tree::Int(number as i64)
    } else {
        Tree::Float(number)
    }
}
