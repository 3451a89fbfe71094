//! The published form of gpt-oss, and what its file cannot mean here.

use megaburn_kernels::RopeScaling;
use rstest::rstest;
use serde_json::{Value, json};

use super::{super::unread::unread, *};

/// gpt-oss-20b.
fn published() -> Value {
    json!({
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201_088,
        "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "head_dim": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32,
        "num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": true,
        "hidden_act": "silu", "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
        "rope_theta": 150_000, "swiglu_limit": 7.0, "tie_word_embeddings": false,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
            "original_max_position_embeddings": 4096, "truncate": false,
        },
    })
}

#[test]
fn the_published_model_has_its_number_of_parameters() {
    let config = read(&published()).unwrap();
    assert_eq!(config.whole_plan().unwrap().num_global(), 20_914_757_184);
    assert_eq!(config.full_layers, (1..24).step_by(2).collect::<Vec<_>>());
    let named = config.hf_params().unwrap();
    let up = named
        .iter()
        .find(|param| param.path == "blocks.3.moe.experts.7.up.weight")
        .unwrap();
    assert_eq!(up.names(), ["model.layers.3.mlp.experts.gate_up_proj[7]"]);
    assert_eq!(up.parts[0].columns[..3], [0..1, 2880..2881, 1..2]);
    assert!(!up.transposed);
}

/// Without a scaling, Transformers' class has YaRN.
#[test]
fn the_default_scaling_is_yarn() {
    let scaling = |json: &Value| {
        let config = read(json).unwrap();
        config.positions.rotary().unwrap().scaling.clone()
    };
    let mut sparse = published();
    sparse.as_object_mut().unwrap().remove("rope_scaling");
    assert_eq!(scaling(&sparse), scaling(&published()));
    sparse["rope_parameters"] = json!({"rope_type": "default"});
    assert_eq!(scaling(&sparse), RopeScaling::None);
}

#[rstest]
#[case("quantization_config", json!({"quant_method": "mxfp4"}), "is set to `mxfp4`: this method is not supported")]
#[case("swiglu_limit", json!(5.0), "`swiglu_limit` is 5.0, but only 7.0 is supported")]
#[case("swiglu_alpha", json!(1.0), "`swiglu_alpha` is 1.0, but only 1.702 is supported")]
#[case("hidden_act", json!("gelu"), "`hidden_act` is \"gelu\"")]
fn what_it_cannot_mean_is_refused(#[case] key: &str, #[case] value: Value, #[case] message: &str) {
    let mut json = published();
    json[key] = value;
    let error = read(&json).unwrap_err();
    assert!(error.contains(message), "{error}");
}

/// The published files repeat two numbers under the names of OpenAI's own code.
#[test]
fn its_own_names_are_read_and_must_agree() {
    let mut json = published();
    json["experts_per_token"] = 4.into();
    json["initial_context_length"] = 4096.into();
    assert_eq!(unread(&json, Family::GPT_OSS).unwrap(), [""; 0]);
    assert_eq!(read(&json).unwrap(), read(&published()).unwrap());
    for (key, message) in [
        (
            "experts_per_token",
            "`experts_per_token` is 2, but `num_experts_per_tok` is 4",
        ),
        (
            "initial_context_length",
            "`initial_context_length` is 2, but the original length of `rope_scaling` is 4096",
        ),
    ] {
        let mut json = json.clone();
        json[key] = 2.into();
        let error = read(&json).unwrap_err();
        assert!(error.contains(message), "{error}");
    }
}
