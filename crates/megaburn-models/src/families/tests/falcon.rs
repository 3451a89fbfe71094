//! Tests of Falcon's `config.json`, whose flags choose between several forms of a block.

use super::*;

/// The published file of Falcon 7B, without its length: 2048 is the default of Transformers.
pub(super) const FALCON_7B: &str = r#"{"alibi": false, "architectures": ["FalconForCausalLM"],
    "apply_residual_connection_post_layernorm": false, "attention_dropout": 0.0, "bias": false,
    "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0, "hidden_size": 4544,
    "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "falcon",
    "multi_query": true, "new_decoder_architecture": false, "num_attention_heads": 71,
    "num_hidden_layers": 32, "parallel_attn": true, "torch_dtype": "bfloat16",
    "use_cache": true, "vocab_size": 65024}"#;

/// The published file of Falcon 40B.
pub(super) const FALCON_40B: &str = r#"{"alibi": false, "architectures": ["FalconForCausalLM"],
    "attention_dropout": 0.0, "bias": false, "bos_token_id": 11, "eos_token_id": 11,
    "hidden_dropout": 0.0, "hidden_size": 8192, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "falcon", "new_decoder_architecture": true,
    "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8,
    "parallel_attn": true, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 65024}"#;

fn with(json: &str, keys: &Value) -> Result<DecoderConfig, String> {
    let mut json: Value = serde_json::from_str(json).unwrap();
    for (key, value) in keys.as_object().unwrap() {
        json[key] = value.clone();
    }
    read(&json)
}

#[rstest]
#[case(json!({}), 1, BlockOrder::ParallelSharedNorm)]
#[case(json!({"num_kv_heads": 71}), 1, BlockOrder::ParallelSharedNorm)]
#[case(json!({"multi_query": false}), 71, BlockOrder::ParallelSharedNorm)]
#[case(json!({"multi_query": null, "parallel_attn": null}), 71, BlockOrder::Serial)]
#[case(json!({"parallel_attn": false}), 1, BlockOrder::Serial)]
#[case(json!({"new_decoder_architecture": true}), 71, BlockOrder::Parallel)]
#[case(json!({"new_decoder_architecture": true, "num_ln_in_parallel_attn": 1}), 71, BlockOrder::ParallelSharedNorm)]
fn flags_choose_the_heads_and_the_norms(
    #[case] keys: Value,
    #[case] kv_heads: usize,
    #[case] order: BlockOrder,
) {
    let config = with(FALCON_7B, &keys).unwrap();
    assert_eq!((config.kv_heads, config.block_order), (kv_heads, order));
    assert_eq!((config.ffn, config.max_seq_len), (4 * 4544, 2048));
    assert_eq!(read(&config.to_hf()).unwrap(), config);
    config.check_sayable().unwrap();
}

#[rstest]
#[case(json!({"num_ln_in_parallel_attn": 1}), BlockOrder::ParallelSharedNorm)]
#[case(json!({}), BlockOrder::Parallel)]
fn a_model_of_groups_is_written_as_it_was_read(#[case] keys: Value, #[case] order: BlockOrder) {
    let config = with(FALCON_40B, &keys).unwrap();
    assert_eq!((config.kv_heads, config.block_order), (8, order));
    assert_eq!(read(&config.to_hf()).unwrap(), config);
    let names: Vec<String> = config
        .hf_params()
        .unwrap()
        .iter()
        .flat_map(|param| param.names())
        .collect();
    let has = |name: &str| {
        names
            .iter()
            .any(|of| of == &format!("transformer.h.0.{name}.weight"))
    };
    let is_parallel = order == BlockOrder::Parallel;
    assert_eq!([has("ln_attn"), has("ln_mlp")], [is_parallel; 2]);
    assert_eq!(has("input_layernorm"), !is_parallel);
    assert!(!has("post_attention_layernorm"));
}

#[rstest]
#[case(json!({"hidden_size": 4545}), "`hidden_size` 4545 is not a multiple")]
#[case(json!({"activation": "relu2"}), "`activation` is relu2; gelu_new")]
#[case(json!({"multi_query": false, "num_kv_heads": 2}), "`num_kv_heads` is 2 for 71 query heads")]
#[case(json!({"num_ln_in_parallel_attn": 2}), "`num_ln_in_parallel_attn` is 2, but must be 1")]
#[case(json!({"new_decoder_architecture": true, "parallel_attn": false}), "`parallel_attn` is false")]
#[case(json!({"new_decoder_architecture": true, "num_kv_heads": 3}), "not divisible by 3 key/value heads")]
fn what_has_no_meaning_is_refused_by_name(#[case] keys: Value, #[case] message: &str) {
    let error = with(FALCON_7B, &keys).unwrap_err();
    assert!(error.contains(message), "{error}");
}
