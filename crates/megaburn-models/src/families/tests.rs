mod deepseek;
mod defaults;
mod falcon;
mod gpt_neox;
mod gpt_oss;
mod nemotron;
mod parts;
mod registered;
mod sizes;
mod unread;

use rstest::rstest;
use serde_json::json;

use super::*;
use crate::decoder::{BlockOrder, Multipliers};
use megaburn_kernels::RopeScaling;
use megaburn_parallel::Activation;

fn read_text(text: &str) -> Result<DecoderConfig, String> {
    read(&serde_json::from_str(text).unwrap())
}

const LLAMA_3_1: &str = r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 128256,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rope_theta": 500000.0, "rms_norm_eps": 1e-05, "tie_word_embeddings": false,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"}}"#;

#[test]
fn a_published_config_is_read() {
    let config = read_text(LLAMA_3_1).unwrap();
    assert_eq!(config.head_dim, 128);
    let rotary = config.positions.rotary().unwrap();
    assert_eq!(rotary.theta, 500000.0);
    assert!(matches!(
        rotary.scaling,
        RopeScaling::Llama3 { factor: 8.0, .. }
    ));
}

#[test]
fn todays_rope_parameters_mean_the_same() {
    let published: Value = serde_json::from_str(LLAMA_3_1).unwrap();
    let mut today = published.clone();
    let mut rope = today["rope_scaling"].take();
    rope["rope_theta"] = 500000.0.into();
    today["rope_parameters"] = rope;
    today.as_object_mut().unwrap().remove("rope_theta");
    assert_eq!(read(&today).unwrap(), read(&published).unwrap());
}

/// Numbers as Transformers reads them, in both forms.
#[rstest]
#[case(json!({"factor": 4.0}), (4.0, 131072), (32.0, 1.0))]
#[case(json!({"factor": null, "original_max_position_embeddings": 8192}), (16.0, 8192), (32.0, 1.0))]
#[case(json!({"factor": 2.0, "beta_fast": 0, "beta_slow": 0.5}), (2.0, 131072), (32.0, 0.5))]
fn yarn_means_what_transformers_means(
    #[case] rope: Value,
    #[case] (factor, original): (f64, usize),
    #[case] betas: (f64, f64),
) {
    for (key, kind) in [("rope_scaling", "type"), ("rope_parameters", "rope_type")] {
        let mut json: Value = serde_json::from_str(LLAMA_3_1).unwrap();
        json["rope_scaling"] = Value::Null;
        json[key] = rope.clone();
        json[key][kind] = "yarn".into();
        let config = read(&json).unwrap();
        let rotary = config.positions.rotary().unwrap();
        let RopeScaling::Yarn(yarn) = &rotary.scaling else {
            panic!("{:?}", config.positions)
        };
        assert_eq!(
            (rotary.theta, yarn.factor, yarn.original_max_position),
            (500000.0, factor, original)
        );
        assert_eq!((yarn.beta_fast, yarn.beta_slow), betas);
        assert_eq!(read(&config.to_hf()).unwrap(), config);
    }
    let full = json!({"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 64,
        "beta_fast": 8.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.0,
        "attention_factor": 1.5, "truncate": false, "rope_theta": 100.0});
    let mut json: Value = serde_json::from_str(LLAMA_3_1).unwrap();
    json["rope_scaling"] = Value::Null;
    json["rope_parameters"] = full.clone();
    assert_eq!(read(&json).unwrap().to_hf()["rope_parameters"], full);
}

/// Parameter counts as published.
#[rstest]
#[case::llama_3_8b(LLAMA_3_1, 8_030_261_248)]
#[case::gpt2(
    r#"{"architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_layer": 12, "n_head": 12,
        "n_positions": 1024, "vocab_size": 50257, "layer_norm_epsilon": 1e-5}"#,
    124_439_808
)]
#[case::mistral_7b(
    r#"{"architectures": ["MistralForCausalLM"], "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 32768, "sliding_window": null}"#,
    7_241_732_096
)]
#[case::qwen2_5_0_5b(
    r#"{"architectures": ["Qwen2ForCausalLM"], "vocab_size": 151936, "hidden_size": 896,
        "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "max_position_embeddings": 32768, "tie_word_embeddings": true,
        "use_sliding_window": false, "sliding_window": 32768, "max_window_layers": 24}"#,
    494_032_768
)]
#[case::qwen3_8b(
    r#"{"architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 4096,
        "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}"#,
    8_190_735_360
)]
#[case::qwen1_5_moe_a2_7b(
    r#"{"architectures": ["Qwen2MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 16, "max_position_embeddings": 8192, "max_window_layers": 21,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        "num_experts": 60, "num_experts_per_tok": 4, "decoder_sparse_step": 1,
        "norm_topk_prob": false, "use_sliding_window": false, "sliding_window": 32768}"#,
    14_315_784_192
)]
#[case::bert_base(
    r#"{"architectures": ["BertForPreTraining"], "vocab_size": 30522, "hidden_size": 768,
        "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "max_position_embeddings": 512, "type_vocab_size": 2}"#,
    110_106_428
)]
#[case::t5_small(
    r#"{"architectures": ["T5ForConditionalGeneration"], "vocab_size": 32128, "d_model": 512,
        "d_ff": 2048, "d_kv": 64, "num_layers": 6, "num_heads": 8, "n_positions": 512}"#,
    60_506_624
)]
#[case::t5_v1_1_base(
    r#"{"architectures": ["T5ForConditionalGeneration"], "vocab_size": 32128, "d_model": 768,
        "d_ff": 2048, "d_kv": 64, "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12,
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": false}"#,
    247_577_856
)]
#[case::mt5_small(
    r#"{"architectures": ["MT5ForConditionalGeneration"], "vocab_size": 250112, "d_model": 512,
        "d_ff": 1024, "d_kv": 64, "num_layers": 8, "num_decoder_layers": 8, "num_heads": 6,
        "tie_word_embeddings": false}"#,
    300_176_768
)]
#[case::falcon_7b(falcon::FALCON_7B, 6_921_720_704)]
#[case::falcon_40b(falcon::FALCON_40B, 41_303_293_952)]
#[case::pythia_160m(gpt_neox::PYTHIA_160M, 162_322_944)]
fn published_models_have_their_number_of_parameters(#[case] json: &str, #[case] params: usize) {
    let config = read_text(json).unwrap();
    assert_eq!(config.whole_plan().unwrap().num_global(), params);
    let named: usize = config
        .hf_params()
        .unwrap()
        .iter()
        .map(|p| p.shape.iter().product::<usize>())
        .sum();
    assert_eq!(named, params);
}

#[test]
fn what_is_written_is_read_again() {
    for family in Family::BUILT_IN {
        let template = family.template();
        let varied = DecoderConfig {
            // The head of masked tokens is always tied.
            tied: template.masked_head || !template.tied,
            norm_eps: 3e-6,
            ..template.clone()
        };
        for config in [template, varied] {
            assert_eq!(read(&config.to_hf()).unwrap(), config);
        }
        assert_eq!(family.to_string().parse::<Family>().unwrap(), family);
    }
    let windowed = DecoderConfig {
        window: Some(7),
        full_layers: vec![0, 2],
        ..Family::QWEN2.template()
    };
    assert_eq!(read(&windowed.to_hf()).unwrap(), windowed);
    let biased = DecoderConfig {
        qkv_bias: true,
        output_bias: true,
        mlp_bias: true,
        ..Family::LLAMA.template()
    };
    assert_eq!(read(&biased.to_hf()).unwrap(), biased);
    let serial = DecoderConfig {
        block_order: BlockOrder::Serial,
        activation: Activation::GeluTanh,
        qkv_bias: false,
        output_bias: false,
        ..Family::GPT_NEOX.template()
    };
    assert_eq!(read(&serial.to_hf()).unwrap(), serial);
    let version_1_0 = DecoderConfig {
        activation: Activation::Relu,
        layers: 5,
        encoder_layers: 3,
        multipliers: Multipliers {
            logits_scaling: 128f64.sqrt(),
            ..Multipliers::default()
        },
        ..Family::T5.template()
    };
    assert_eq!(read(&version_1_0.to_hf()).unwrap(), version_1_0);
}

#[test]
fn a_window_covers_the_layers_that_the_config_says() {
    let windows = |family: Family, json: Value| {
        let mut all = family.template().to_hf();
        all.as_object_mut().unwrap().remove("layer_types");
        all.as_object_mut()
            .unwrap()
            .extend(json.as_object().unwrap().clone());
        let config = read(&all).unwrap();
        (0..config.layers)
            .map(|layer| config.layer_window(layer))
            .collect::<Vec<_>>()
    };
    let on = json!({"use_sliding_window": true, "sliding_window": 9, "max_window_layers": 3});
    let expected = [None, None, None, Some(9)];
    assert_eq!(windows(Family::QWEN2, on.clone()), expected);
    let expected = [Some(9), None, Some(9), None];
    assert_eq!(windows(Family::QWEN2_MOE, on.clone()), expected);
    let mut first = on;
    first["max_window_layers"] = 1.into();
    let expected = [Some(9), None, None, None];
    assert_eq!(windows(Family::QWEN2_MOE, first), expected);
    let off = json!({"use_sliding_window": false, "sliding_window": 9, "max_window_layers": 0});
    assert_eq!(windows(Family::QWEN2, off.clone()), [None; 4]);
    assert_eq!(windows(Family::QWEN2_MOE, off), [None; 4]);
}

#[test]
fn a_gate_without_a_shared_expert_is_refused() {
    let mut config = Family::QWEN2_MOE.template();
    config.experts.as_mut().unwrap().shared_ffn = None;
    let error = config.validate().unwrap_err().to_string();
    assert!(error.contains("there is no shared expert"), "{error}");
    // Another family's `config.json` cannot express the gate.
    let mut mixtral = Family::MIXTRAL.template();
    let experts = mixtral.experts.as_mut().unwrap();
    experts.shared_ffn = Some(12);
    experts.shared_gate = true;
    mixtral.validate().unwrap();
    let error = mixtral.check_sayable().unwrap_err().to_string();
    assert!(
        error.contains("`experts`") && error.contains("cannot express"),
        "{error}"
    );
}

#[rstest]
#[case("architectures", json!(["MambaForCausalLM"]), "architecture `MambaForCausalLM` is not supported; supported are GPT2LMHeadModel, LlamaForCausalLM")]
#[case("architectures", Value::Null, "`architectures` is missing")]
#[case("hidden_size", Value::Null, "`hidden_size` is missing")]
#[case("hidden_size", json!("big"), "`hidden_size` is \"big\", expected an integer")]
#[case("hidden_act", json!("gelu"), "`hidden_act` is \"gelu\", but only \"silu\" is supported")]
#[case("num_key_value_heads", json!(5), "query heads are not divisible by 5 key/value heads")]
#[case("rope_scaling", json!({"rope_type": "ntk"}), "`ntk` is not supported; `default`, `linear`, `llama3`, `yarn`, `longrope` and `dynamic`")]
#[case("rope_scaling", json!({"rope_type": "llama3"}), "`llama3` needs a number `factor`")]
#[case("rope_scaling", json!({"rope_type": "yarn", "factor": "4"}), "`factor` is \"4\", expected a number")]
#[case("rope_scaling", json!({"rope_type": "yarn", "factor": 4, "beta_fast": 0.5}), "beta_fast is 0.5")]
#[case("quantization_config", json!({"bits": 4}), "`quantization_config` is set to `unknown`")]
#[case("quantization_config", json!({"quant_method": "gptq"}), "`quantization_config` is set to `gptq`: this method is not supported")]
#[case("partial_rotary_factor", json!(0.5), "only 1.0 is supported")]
#[case("rms_norm_eps", json!("1e-5"), "`rms_norm_eps` is \"1e-5\", expected a number")]
fn what_cannot_be_is_refused_by_name(
    #[case] key: &str,
    #[case] value: Value,
    #[case] message: &str,
) {
    let mut json: Value = serde_json::from_str(LLAMA_3_1).unwrap();
    json[key] = value;
    let error = read(&json).unwrap_err();
    assert!(error.contains(message), "{error}");
}
