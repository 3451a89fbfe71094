//! What a resumed run does about a key whose value has changed.

use std::collections::BTreeMap;

use serde_json::Value;

/// The consequence of a changed value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyClass {
    /// It makes another run, so resuming is refused.
    Identity,
    /// The key names files. Resuming compares their contents: text and tokenizer by hash, and how
    /// samples are read by the checkpoint's own record.
    Content,
    /// The numbers of later steps change. Resuming reports it.
    Numeric,
    /// `Numeric` under any of these settings, `Neutral` otherwise.
    Under(&'static [Setting]),
    /// No number changes beyond rounding: layout, output, time limits.
    Neutral,
}

/// A setting under which the split into micro-batches or over ranks changes numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Setting {
    /// There is a load-balancing loss over each micro-batch.
    AuxLoss,
    /// Sinkhorn routing uses the scores of a full micro-batch.
    Sinkhorn,
    /// Expert capacity is counted over the tokens of one rank in a micro-batch, and tokens over
    /// capacity are dropped.
    RankCapacity,
    /// `RankCapacity` with hybrid context parallelism, which assigns documents to all data-parallel
    /// ranks.
    DealtCapacity,
    /// Muon orthogonalizes the shard of each tensor-parallel rank separately.
    BlockwiseMuon,
    /// Elements of a micro-batch share scales when its matrices are quantised.
    Quantised,
}

use KeyClass::{Content, Identity, Neutral, Numeric, Under};
use Setting::{AuxLoss, BlockwiseMuon, DealtCapacity, Quantised, RankCapacity, Sinkhorn};

/// The class of every key, by section. A test fails if one is missing.
const CLASSES: &[(KeyClass, &str, &str)] = &[
    (Neutral, "run", "dir allow_other_files device"),
    (Identity, "run", "seed"),
    (
        Identity,
        "model",
        "init family hidden ffn layers encoder_layers mtp_layers heads kv_heads head_dim vocab \
         window rope_theta norm_eps tied",
    ),
    (
        Identity,
        "model.experts",
        "num top_k ffn shared_ffn shared_gate router_bias normalise scale groups layer_freq",
    ),
    (
        Identity,
        "model.parts",
        "norm norm_placement bidirectional embedding_norm token_types masked_head binary_head \
         zero_centered_gamma block_order activation qkv_bias output_bias \
         mlp_bias qk_norm attention_scale attention_soft_cap attention_sinks \
         logits_soft_cap positions \
         alibi_scaled relative_buckets relative_max_distance rotary_percent rotary_interleaved \
         window_rope_theta rotary_layers window_layers \
         embedding_multiplier residual_multiplier logits_scaling mup_base_hidden \
         init_std",
    ),
    (
        Identity,
        "model.latent",
        "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim",
    ),
    (
        Identity,
        "model.rope_scaling",
        "kind factor low_freq_factor high_freq_factor truncate \
         original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim \
         attention_factor short_factor long_factor",
    ),
    (Under(&[RankCapacity, BlockwiseMuon]), "parallel", "tp"),
    (Under(&[RankCapacity]), "parallel", "cp cp_comm cp_pad"),
    (Under(&[DealtCapacity]), "parallel", "dp"),
    (Under(&[BlockwiseMuon]), "parallel", "etp"),
    (
        Neutral,
        "parallel",
        "ranks pp ep sp zero zero_ranks bucket_size overlap schedule chunks micro_batch_group \
         pipeline_layout first_stage_layers last_stage_layers count_embedding count_loss",
    ),
    (
        Under(&[AuxLoss, Sinkhorn, RankCapacity]),
        "parallel",
        "max_tokens_per_rank",
    ),
    (
        Content,
        "data",
        "path train tokenizer documents document_multiple",
    ),
    (
        Identity,
        "data",
        "seq_len decoder_seq_len validation_fraction split dataset order packing \
         short_sequence_probability",
    ),
    (
        Identity,
        "data.masking",
        "probability max_ngram whole_words longer_ngrams geometric",
    ),
    (
        Identity,
        "data.fim",
        "rate spm_rate split_sample fragment_rate no_prefix prefix middle suffix",
    ),
    (Numeric, "data", "eod_mask_loss valid test"),
    (Neutral, "data", "cache_dir num_workers"),
    (
        Numeric,
        "train",
        "steps dtype tf32 hidden_dropout attention_dropout label_smoothing z_loss \
         mtp_loss_scaling_factor global_batch eval_batches on_spike spike_factor",
    ),
    (
        Under(&[AuxLoss, Sinkhorn, RankCapacity, Quantised]),
        "train",
        "micro_batch",
    ),
    (
        Neutral,
        "train",
        "tune_products attention fused_linear_cross_entropy eval_interval log_interval \
         checkpoint_interval checkpoint_interval_minutes async_save check_replicas_interval \
         straggler_interval gpu_health_interval rerun_non_finite log_num_zeros log_params_norm \
         log_max_attention_logit pad_batch keep_checkpoints keep_checkpoints_every \
         keep_best_checkpoints local_checkpoint_dir checkpoint_replicas checkpoint_store \
         keep_stored_checkpoints timeout_seconds start_timeout_seconds save_timeout_seconds \
         load_timeout_seconds data_timeout_seconds eval_timeout_seconds step_timeout_seconds \
         exit_after_minutes exit_at_step \
         stopped_exit_code",
    ),
    (Numeric, "train.batch_ramp", "start increment samples"),
    (Identity, "optimizer", "name"),
    (
        Numeric,
        "optimizer",
        "lr min_lr init_lr lr_decay_style schedule_at warmup_steps warmup_samples warmup_fraction \
         decay_steps decay_samples wsd_decay_style wsd_decay_steps wsd_decay_samples \
         decoupled_lr decoupled_min_lr beta1 beta2 eps weight_decay end_weight_decay \
         weight_decay_steps weight_decay_style clip_grad grad_norm_skip_threshold qk_clip \
         qk_clip_alpha qk_clip_threshold loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis main_params_dtype store_param_remainders \
         main_grads_dtype exp_avg_dtype exp_avg_sq_dtype momentum_dtype groups",
    ),
    (Neutral, "optimizer", "cpu_offload_fraction"),
    (Numeric, "optimizer.sgd", "momentum nesterov"),
    (Numeric, "optimizer.lion", "beta1 beta2"),
    (
        Numeric,
        "optimizer.muon",
        "momentum nesterov num_ns_steps coefficients dtype scale_mode extra_scale_factor \
         tp_mode",
    ),
    (
        Numeric,
        "moe",
        "aux_loss seq_aux_loss global_aux_loss z_loss bias_update bias_update_rate sinkhorn \
         capacity_factor drop_policy capacity_scope force_balance",
    ),
    (Neutral, "moe", "pad_to_capacity dispatcher"),
    (
        Neutral,
        "recompute",
        "modules method num_layers offload keep_attention",
    ),
    (
        Numeric,
        "precision",
        "recipe format power_of_two_scales num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 \
         experts_in_bf16 amax_history_len amax_compute margin stochastic_rounding random_hadamard \
         two_dimensional_weights schedule",
    ),
    (
        Neutral,
        "precision",
        "fp8_sequence_gather log_interval fp8_param_gather",
    ),
    (
        Numeric,
        "precision.fallback",
        "max_saturated_share max_underflow_share loss_spike interval duration_steps",
    ),
    (Neutral, "generate", "prompt tokens temperature"),
    (
        Neutral,
        "log",
        "tensorboard csv wandb wandb_project prometheus_port prometheus_host \
         layer_statistics_interval",
    ),
    (
        Neutral,
        "alerts",
        "command webhook on loss_spike stall_seconds",
    ),
    (Neutral, "profile", "steps"),
];

impl Setting {
    /// Whether a record, given as values by dotted path, has this setting.
    pub(crate) fn is_in(self, record: &BTreeMap<String, Value>) -> bool {
        let is = |key: &str, value: Value| record.get(key) == Some(&value);
        match self {
            Self::AuxLoss => {
                let factor = record.get("moe.aux_loss").and_then(Value::as_f64);
                factor.is_some_and(|factor| factor > 0.0)
            }
            Self::Sinkhorn => is("moe.sinkhorn", true.into()),
            Self::RankCapacity => {
                record.contains_key("moe.capacity_factor")
                    && is("moe.capacity_scope", "rank".into())
            }
            Self::DealtCapacity => {
                Self::RankCapacity.is_in(record)
                    && record.contains_key("parallel.max_tokens_per_rank")
            }
            Self::Quantised => {
                let recipe = record.get("precision.recipe");
                recipe.is_some_and(|recipe| recipe.as_str() != Some("bf16"))
                    || record.contains_key("precision.schedule")
            }
            Self::BlockwiseMuon => {
                is("optimizer.name", "muon".into())
                    && is("optimizer.muon.tp_mode", "blockwise".into())
            }
        }
    }
}

/// The class of a key, given as a dotted path; `None` if there is no such key.
pub(crate) fn class_of(key: &str) -> Option<KeyClass> {
    let (section, name) = key.rsplit_once('.')?;
    let holds = |names: &str| names.split(' ').any(|known| known == name);
    let entry = CLASSES
        .iter()
        .find(|(_, of, names)| *of == section && holds(names))?;
    Some(entry.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::schema;

    #[test]
    fn every_key_has_one_class() {
        let listed: Vec<String> = CLASSES
            .iter()
            .flat_map(|(_, section, names)| names.split(' ').map(move |n| format!("{section}.{n}")))
            .collect();
        let keys = schema::keys();
        let is_section = |key: &String| {
            let inside = format!("{key}.");
            keys.iter().any(|other| other.starts_with(&inside))
        };
        for key in keys.iter().filter(|key| !is_section(key)) {
            let found = listed.iter().filter(|listed| *listed == key).count();
            assert_eq!(
                found, 1,
                "config/keys.rs must say once what another `{key}` means"
            );
            assert!(class_of(key).is_some());
        }
        for key in &listed {
            assert!(
                keys.contains(key),
                "config/keys.rs lists `{key}`, which is no key"
            );
        }
    }
}
