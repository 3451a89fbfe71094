//! Suggestions for keys and values that do not exist.

use super::schema;

/// Names that other training systems have for our keys: by the last part of the name, or by the
/// full path where the last part is also a key of ours.
const SYNONYMS: &[(&str, &str)] = &[
    ("learning_rate", "optimizer.lr"),
    ("max_lr", "optimizer.lr"),
    ("min_learning_rate", "optimizer.min_lr"),
    ("wd", "optimizer.weight_decay"),
    ("grad_clip", "optimizer.clip_grad"),
    ("gradient_clip", "optimizer.clip_grad"),
    ("gradient_clipping", "optimizer.clip_grad"),
    ("max_grad_norm", "optimizer.clip_grad"),
    ("max_norm", "optimizer.clip_grad"),
    ("adam_beta1", "optimizer.beta1"),
    ("adam_beta2", "optimizer.beta2"),
    ("adam_eps", "optimizer.eps"),
    ("epsilon", "optimizer.eps"),
    ("optim", "optimizer"),
    ("warmup", "optimizer.warmup_steps"),
    ("warmup_iters", "optimizer.warmup_steps"),
    ("lr_warmup_iters", "optimizer.warmup_steps"),
    ("lr_warmup_steps", "optimizer.warmup_steps"),
    ("warmup_ratio", "optimizer.warmup_fraction"),
    ("lr_decay_iters", "optimizer.decay_steps"),
    ("lr_scheduler", "optimizer.lr_decay_style"),
    ("lr_scheduler_type", "optimizer.lr_decay_style"),
    ("batch_size", "train.global_batch"),
    ("global_batch_size", "train.global_batch"),
    ("micro_batch_size", "train.micro_batch"),
    ("gradient_accumulation_steps", "train.global_batch"),
    ("max_steps", "train.steps"),
    ("num_steps", "train.steps"),
    ("iters", "train.steps"),
    ("train_iters", "train.steps"),
    ("epochs", "train.steps"),
    ("num_train_epochs", "train.steps"),
    ("bf16", "train.dtype"),
    ("fp16", "train.dtype"),
    ("dropout", "train.hidden_dropout"),
    ("save_interval", "train.checkpoint_interval"),
    ("save_steps", "train.checkpoint_interval"),
    ("save_total_limit", "train.keep_checkpoints"),
    ("eval_steps", "train.eval_interval"),
    ("eval_iters", "train.eval_batches"),
    ("logging_steps", "train.log_interval"),
    ("timeout", "train.timeout_seconds"),
    ("training", "train"),
    ("hidden_size", "model.hidden"),
    ("d_model", "model.hidden"),
    ("n_embd", "model.hidden"),
    ("dim", "model.hidden"),
    ("intermediate_size", "model.ffn"),
    ("ffn_hidden_size", "model.ffn"),
    ("d_ff", "model.ffn"),
    ("num_hidden_layers", "model.layers"),
    ("model.num_layers", "model.layers"),
    ("encoder_num_layers", "model.encoder_layers"),
    ("n_layer", "model.layers"),
    ("n_layers", "model.layers"),
    ("num_attention_heads", "model.heads"),
    ("num_heads", "model.heads"),
    ("n_head", "model.heads"),
    ("n_heads", "model.heads"),
    ("num_key_value_heads", "model.kv_heads"),
    ("num_query_groups", "model.kv_heads"),
    ("n_kv_heads", "model.kv_heads"),
    ("vocab_size", "model.vocab"),
    ("sliding_window", "model.window"),
    ("rotary_base", "model.rope_theta"),
    ("rms_norm_eps", "model.norm_eps"),
    ("layer_norm_eps", "model.norm_eps"),
    ("tie_word_embeddings", "model.tied"),
    ("model_type", "model.family"),
    ("architecture", "model.family"),
    ("num_experts", "model.experts.num"),
    ("num_experts_per_tok", "model.experts.top_k"),
    ("moe_router_topk", "model.experts.top_k"),
    ("sequence_length", "data.seq_len"),
    ("seq_length", "data.seq_len"),
    ("max_seq_len", "data.seq_len"),
    ("max_length", "data.seq_len"),
    ("block_size", "data.seq_len"),
    ("context_length", "data.seq_len"),
    ("data_path", "data.path"),
    ("train_data", "data.path"),
    ("val_fraction", "data.validation_fraction"),
    ("output_dir", "run.dir"),
    ("save_dir", "run.dir"),
    ("tensor_parallel", "parallel.tp"),
    ("tensor_model_parallel_size", "parallel.tp"),
    ("tp_size", "parallel.tp"),
    ("pipeline_parallel", "parallel.pp"),
    ("pipeline_model_parallel_size", "parallel.pp"),
    ("pp_size", "parallel.pp"),
    ("context_parallel", "parallel.cp"),
    ("context_parallel_size", "parallel.cp"),
    ("cp_comm_type", "parallel.cp_comm"),
    ("data_parallel", "parallel.dp"),
    ("dp_size", "parallel.dp"),
    ("expert_parallel", "parallel.ep"),
    ("expert_model_parallel_size", "parallel.ep"),
    ("sequence_parallel", "parallel.sp"),
    ("zero_stage", "parallel.zero"),
    ("world_size", "parallel.ranks"),
    ("activation_checkpointing", "recompute.method"),
    ("gradient_checkpointing", "recompute.method"),
    ("fp4_recipe", "precision.recipe"),
    ("fp8_recipe", "precision.recipe"),
    ("fp8_format", "precision.format"),
    ("fp8_margin", "precision.margin"),
    ("max_new_tokens", "generate.tokens"),
];

/// Names that other training systems have for values.
const VALUES: &[(&str, &str)] = &[
    ("float32", "f32"),
    ("fp32", "f32"),
    ("float", "f32"),
    ("bfloat16", "bf16"),
    ("float16", "f16"),
    ("fp16", "f16"),
    ("half", "f16"),
    ("flash", "auto"),
    ("full", "uniform"),
];

/// The existing key that `key` probably means; `None` if no key is similar.
///
/// In order of preference: a key of the same name in another section (`train.lr`, or `lr` alone), a
/// synonym from another system, a misspelling. Ties go to the key with the longest common prefix.
pub(crate) fn nearest_key(key: &str) -> Option<String> {
    let name = plain(last(key));
    let keys = schema::keys();
    let is_named = keys.iter().any(|candidate| plain(last(candidate)) == name);
    let synonym = SYNONYMS
        .iter()
        .find(|(other, _)| *other == name || *other == key);
    if let Some((_, ours)) = synonym.filter(|(other, _)| !is_named || *other == key) {
        return Some(ours.to_string());
    }
    let distance = |candidate: &String| {
        let of_name = strsim::damerau_levenshtein(&name, &plain(last(candidate)));
        let alike = key
            .chars()
            .zip(candidate.chars())
            .take_while(|(a, b)| a == b)
            .count();
        let of_path = strsim::damerau_levenshtein(key, candidate);
        (of_name, of_path, std::cmp::Reverse(alike))
    };
    let best = keys.iter().min_by_key(|candidate| distance(candidate))?;
    is_like(&name, &plain(last(best))).then(|| best.clone())
}

/// The one of `keys` that `key` probably means: one of the same name, or a misspelling; `None` if
/// none is similar.
pub(crate) fn nearest_of<'a>(key: &str, keys: &[&'a str]) -> Option<&'a str> {
    let name = plain(last(key));
    let distance = |candidate: &&str| {
        let of_name = strsim::damerau_levenshtein(&name, &plain(last(candidate)));
        (of_name, strsim::damerau_levenshtein(key, candidate))
    };
    let best = keys.iter().copied().min_by_key(distance)?;
    is_like(&name, &plain(last(best))).then_some(best)
}

/// The key that a command-line flag probably means, by its own name or a synonym; `None` if there
/// is none.
pub fn setting_of_flag(flag: &str) -> Option<String> {
    let name = plain(flag.split('=').next().unwrap_or_default());
    let key = nearest_key(&name)?;
    let is_named = plain(last(&key)) == name || SYNONYMS.iter().any(|(other, _)| *other == name);
    (is_named && !schema::is_section(&key)).then_some(key)
}

/// The value among `known` that `value` probably means; `None` if none is similar.
pub(super) fn nearest_value<'a>(value: &str, known: &[&'a str]) -> Option<&'a str> {
    let value = bare(value);
    let other = VALUES
        .iter()
        .find(|(other, _)| *other == value)
        .map(|(_, ours)| *ours);
    let value = other.unwrap_or(&value);
    let distance = |known: &&str| strsim::damerau_levenshtein(value, &bare(known));
    let best = known.iter().copied().min_by_key(distance)?;
    is_like(value, &bare(best)).then_some(best)
}

fn last(key: &str) -> &str {
    key.rsplit('.').next().unwrap_or_default()
}

/// Normalises a name to lower case and underscores, as keys are written.
fn plain(name: &str) -> String {
    name.to_lowercase().replace('-', "_")
}

/// Normalises a value to lower case without separators.
fn bare(value: &str) -> String {
    value.to_lowercase().replace(['-', '_', ' '], "")
}

/// Whether one name may be a misspelling of the other: at most a third of the letters differ, or
/// one.
fn is_like(name: &str, other: &str) -> bool {
    let most = (name.len().max(other.len()) / 3).max(1);
    strsim::damerau_levenshtein(name, other) <= most
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("parallel.tpp", "parallel.tp")]
    #[case("optimizer.mni_lr", "optimizer.min_lr")]
    #[case("stesp", "train.steps")]
    #[case("trian", "train")]
    #[case("train.lr", "optimizer.lr")]
    #[case("lr", "optimizer.lr")]
    #[case("optimizer.beta_1", "optimizer.beta1")]
    #[case("model.rope_scaling.factr", "model.rope_scaling.factor")]
    #[case("optimizer.learning_rate", "optimizer.lr")]
    #[case("learning-rate", "optimizer.lr")]
    #[case("train.batch_size", "train.global_batch")]
    #[case("model.num_layers", "model.layers")]
    #[case("model.hidden_size", "model.hidden")]
    #[case("data.seq_length", "data.seq_len")]
    #[case("optimizer.decay_step", "optimizer.decay_steps")]
    fn the_nearest_key_is_the_one_meant(#[case] given: &str, #[case] value_or_default: &str) {
        assert_eq!(nearest_key(given).as_deref(), Some(value_or_default));
    }

    #[rstest]
    #[case("empty")]
    #[case("optimizer.wibble")]
    #[case("x")]
    fn a_key_like_no_other_has_no_nearest(#[case] given: &str) {
        assert_eq!(nearest_key(given), None);
    }

    #[test]
    fn what_other_systems_say_names_keys_that_exist_and_hides_none() {
        let keys = schema::keys();
        for (other, ours) in SYNONYMS {
            assert!(
                keys.iter().any(|key| key == ours),
                "{other}: there is no {ours}"
            );
            assert!(
                keys.iter().all(|key| last(key) != *other),
                "{other} is a key of ours"
            );
        }
    }

    #[rstest]
    #[case("zbv", &["gpipe", "1f1b", "zb-h1", "zb-v"], Some("zb-v"))]
    #[case("ZB_V", &["gpipe", "1f1b", "zb-h1", "zb-v"], Some("zb-v"))]
    #[case("adam", &["adamw", "sgd", "lion", "muon"], Some("adamw"))]
    #[case("adagrad", &["adamw", "sgd", "lion", "muon"], None)]
    #[case("bfloat16", &["f32", "bf16", "f16"], Some("bf16"))]
    #[case("half", &["f32", "bf16", "f16"], Some("f16"))]
    #[case("full", &["none", "uniform", "block"], Some("uniform"))]
    fn the_nearest_value_is_the_one_meant(
        #[case] given: &str,
        #[case] known: &[&str],
        #[case] value_or_default: Option<&str>,
    ) {
        assert_eq!(nearest_value(given, known), value_or_default);
    }
}
