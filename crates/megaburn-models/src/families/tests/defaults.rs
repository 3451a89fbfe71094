//! Tests that absent and null keys mean the same as in Transformers' configuration class of the
//! family.

use std::collections::BTreeSet;

use super::*;

/// The defaults of the classes, written by `tests/tools/hf_defaults.py`.
const CLASSES: &str = include_str!("../../../../../tests/fixtures/config-defaults.json");

/// Keys of the classes that are not read, because they do not change what a model computes, or
/// because their values follow from other keys here (`head_dim` and `qk_head_dim` of the DeepSeek
/// families, the parts of `feed_forward_proj` and `scale_decoder_outputs` of T5).
/// `docs/families.md` says what is left out of training.
const NOT_READ: &[&str] = &[
    "_sliding_window_pattern",
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "bos_token_id",
    "classifier_dropout",
    "decoder_start_token_id",
    "dense_act_fn",
    "dropout_rate",
    "embd_pdrop",
    "embedding_dropout",
    "eos_token_id",
    "hidden_dropout",
    "hidden_dropout_prob",
    "initializer_factor",
    "initializer_range",
    "is_decoder",
    "is_gated_act",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "qk_head_dim",
    "resid_pdrop",
    "residual_dropout",
    "router_aux_loss_coef",
    "scale_decoder_outputs",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "use_cache",
];

pub(super) fn classes() -> Value {
    serde_json::from_str::<Value>(CLASSES).unwrap()["families"].take()
}

/// The optional keys of a family's class that are read.
fn keys(classes: &Value, family: Family) -> Vec<(&str, &Value)> {
    let latent = family.template().latent.is_some();
    let keys = classes[family.definition().model_type()]["keys"]
        .as_object()
        .unwrap();
    let is_read = |key: &str| !(NOT_READ.contains(&key) || (latent && key == "head_dim"));
    keys.iter()
        .map(|(key, is)| (key.as_str(), is))
        .filter(|(key, _)| is_read(key))
        .collect()
}

fn find(family: Family, key: &str) -> Option<&'static KeyDefault> {
    family
        .definition()
        .defaults()
        .iter()
        .copied()
        .flatten()
        .find(|default| default.key == key)
}

#[test]
fn the_defaults_are_those_of_the_classes() {
    let classes = classes();
    for family in Family::BUILT_IN {
        let keys = keys(&classes, family);
        for (key, is) in &keys {
            let default = find(family, key).unwrap_or_else(|| panic!("{family}: `{key}`"));
            for (meaning, value) in [(default.absent, &is["absent"]), (default.null, &is["null"])] {
                // The default is computed from other keys, is refused, or is the empty list.
                let is_open = value.is_object() || value.is_array();
                assert!(
                    is_open || meaning.to_json() == *value,
                    "{family}: `{key}` is {value}"
                );
            }
        }
        let known: BTreeSet<_> = keys.iter().map(|(key, _)| *key).collect();
        // A class may lack a key that most families have, such as the epsilon of RMSNorm.
        let is_common = |key| llama::COMMON.iter().any(|default| default.key == key);
        let stray = family.definition().defaults().iter().copied().flatten();
        let stray = stray
            .map(|default| default.key)
            .find(|key| !(known.contains(key) || is_common(*key)));
        assert_eq!(stray, None, "{family}: the class has no such key");
    }
}

/// A minimal `config.json` of a family: required keys only.
fn sparse(family: Family) -> Value {
    let mut json = if family == Family::GPT2 {
        serde_json::json!({
            "vocab_size": 9, "n_embd": 64, "n_layer": 30, "n_head": 4, "n_positions": 8
        })
    } else if [Family::T5, Family::MT5].contains(&family) {
        serde_json::json!({
            "vocab_size": 9, "d_model": 512, "d_ff": 8, "num_layers": 30, "num_heads": 128
        })
    } else {
        // 128 heads are divisible by the default number of key/value heads of every family.
        serde_json::json!({
            "vocab_size": 9, "hidden_size": 512, "intermediate_size": 8, "num_hidden_layers": 30,
            "num_attention_heads": 128, "max_position_embeddings": 8
        })
    };
    json["architectures"] = serde_json::json!([family.definition().architecture()]);
    if family == Family::GPT_NEOX {
        // A quarter of a head is rotated.
        json["hidden_size"] = 4096.into();
    }
    if family == Family::DEEPSEEK_V2 {
        json["num_experts_per_tok"] = 3.into();
    }
    if find(family, "use_sliding_window").is_some() {
        json["use_sliding_window"] = true.into();
    }
    json
}

/// The value for this file of a default that refers to another key with `as`.
fn value(is: &Value) -> Value {
    match is["as"].as_str() {
        Some("num_layers") => 30.into(),
        Some("num_attention_heads") => 128.into(),
        Some("4 * hidden_size") => 2048.into(),
        Some("hidden_size / num_attention_heads") => 4.into(),
        Some(other) => panic!("{other}"),
        None => is.clone(),
    }
}

/// Leaving a key out, or setting it to null, equals writing its default.
#[test]
fn a_key_without_a_value_reads_as_its_default_written_out() {
    let classes = classes();
    let mut swept = 0;
    for family in Family::BUILT_IN {
        let base = sparse(family);
        for (key, is) in keys(&classes, family) {
            let with = |value: Option<Value>| {
                let mut json = base.clone();
                json.as_object_mut().unwrap().remove(key);
                if let Some(value) = value {
                    json[key] = value;
                }
                read(&json)
            };
            // The file requires the key.
            let is_needed = base.get(key).is_some() && key != "use_sliding_window";
            let [absent, null] = [value(&is["absent"]), value(&is["null"])];
            if !absent.is_null() && !is_needed {
                let written = with(Some(absent.clone())).unwrap();
                assert_eq!(with(None).unwrap(), written, "{family} without `{key}`");
                swept += 1;
            }
            let found = with(Some(Value::Null));
            match &null {
                // No other value means the same as null, or the class accepts null and its model
                // fails.
                Value::Null => match found {
                    Ok(config) if absent.is_null() => assert_eq!(config, with(None).unwrap()),
                    Ok(_) => {}
                    Err(why) => {
                        let said = if absent.is_null() { "missing" } else { "null" };
                        assert!(why.contains(&format!("`{key}` is {said}")), "{why}");
                    }
                },
                // The class refuses null; here it must mean the default or the number of heads.
                Value::Object(_) if !is_needed => {
                    let heads = with(Some(128.into())).ok();
                    let found = found.unwrap();
                    assert!(
                        found == with(Some(absent)).unwrap() || Some(found) == heads,
                        "{family}: `{key}` null"
                    );
                }
                Value::Object(_) => {}
                written => {
                    let written = with(Some(written.clone())).unwrap();
                    assert_eq!(found.unwrap(), written, "{family}: `{key}` null");
                }
            }
        }
    }
    assert!(swept > 60, "only {swept} defaults were swept");
}

/// A null window or query latent switches it off.
#[test]
fn null_switches_a_window_and_a_latent_of_queries_off() {
    for (family, absent) in [
        (Family::MISTRAL, Some(4096)),
        (Family::MIXTRAL, None),
        (Family::QWEN2, Some(4096)),
        (Family::QWEN3_MOE, Some(4096)),
    ] {
        let mut json = sparse(family);
        assert_eq!(read(&json).unwrap().window, absent, "{family}");
        json["sliding_window"] = Value::Null;
        assert_eq!(read(&json).unwrap().window, None, "{family}");
    }
    for family in [Family::DEEPSEEK_V2, Family::DEEPSEEK_V3] {
        let mut json = sparse(family);
        let rank = |json: &Value| read(json).unwrap().latent.unwrap().q_lora_rank;
        assert_eq!(rank(&json), Some(1536));
        json["q_lora_rank"] = Value::Null;
        assert_eq!(rank(&json), None);
    }
}

#[test]
fn numbers_are_compared_as_numbers() {
    for (key, value) in [
        ("partial_rotary_factor", 1.into()),
        ("partial_rotary_factor", 1.0.into()),
    ] {
        let mut json = sparse(Family::LLAMA);
        json[key] = value;
        assert_eq!(read(&json).unwrap(), read(&sparse(Family::LLAMA)).unwrap());
    }
    let mut json = sparse(Family::MIXTRAL);
    json["router_jitter_noise"] = 0.into();
    assert_eq!(
        read(&json).unwrap(),
        read(&sparse(Family::MIXTRAL)).unwrap()
    );
    json["router_jitter_noise"] = 0.1.into();
    assert!(read(&json).unwrap_err().contains("only 0.0 is supported"));
}

/// A missing rotary base is the family's default, even if a scaling is given.
#[test]
fn a_scaling_without_a_base_has_the_familys() {
    for (family, base) in [(Family::LLAMA, 10_000.0), (Family::MIXTRAL, 1e6)] {
        for key in ["rope_scaling", "rope_parameters"] {
            let mut json = sparse(family);
            json[key] = serde_json::json!({"rope_type": "linear", "factor": 2.0});
            let positions = read(&json).unwrap().positions;
            assert_eq!(positions.rotary().unwrap().theta, base, "{family}, {key}");
        }
    }
}
