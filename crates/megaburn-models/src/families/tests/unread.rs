//! Tests that unread keys of a `config.json` are refused or reported.

use rstest::rstest;
use serde_json::json;

use super::{super::unread::unread, *};

fn from_hf(json: &Value) -> Result<DecoderConfig, String> {
    DecoderConfig::from_hf(json, Path::new("config.json")).map_err(|error| error.to_string())
}

/// All keys of Transformers' classes are known, so files that Transformers writes cause no
/// warnings.
#[test]
fn the_keys_of_the_classes_are_known() {
    let classes = super::defaults::classes();
    for family in Family::BUILT_IN {
        let keys = classes[family.definition().model_type()]["keys"]
            .as_object()
            .unwrap();
        let json = keys
            .keys()
            .map(|key| (key.clone(), json!(1)))
            .collect::<serde_json::Map<_, _>>();
        assert_eq!(
            unread(&Value::Object(json), family).unwrap(),
            [""; 0],
            "{family}"
        );
    }
}

#[rstest]
#[case("embedding_multiplier", json!(12.0), Some("`embedding_multiplier` is 12.0: the key changes the computation"))]
#[case("embedding_multiplier", json!(1), None)]
#[case("logits_scaling", json!(8.0), Some("`logits_scaling` is 8.0"))]
#[case("attention_multiplier", json!(0.015625), Some("`attention_multiplier` is 0.015625"))]
#[case("attn_logit_softcapping", Value::Null, None)]
#[case("use_parallel_residual", json!(false), None)]
fn a_key_that_changes_what_is_computed_is_refused(
    #[case] key: &str,
    #[case] value: Value,
    #[case] message: Option<&str>,
) {
    let mut json = Family::LLAMA.template().to_hf();
    json[key] = value;
    match (from_hf(&json), message) {
        (found, None) => assert_eq!(found.unwrap(), Family::LLAMA.template()),
        (found, Some(message)) => {
            let error = found.unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }
}

#[test]
fn other_keys_are_told() {
    let mut json = Family::QWEN3.template().to_hf();
    json["_name_or_path"] = json!("Qwen/Qwen3-8B");
    json["mine"] = json!(7);
    json["unsloth_version"] = json!("2025.1");
    json["old"] = json!(false);
    assert_eq!(
        unread(&json, Family::QWEN3).unwrap(),
        ["mine", "unsloth_version"]
    );
    from_hf(&json).unwrap();
}
