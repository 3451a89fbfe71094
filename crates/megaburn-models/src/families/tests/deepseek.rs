use megaburn_parallel::QkNormKind;
use rstest::rstest;
use serde_json::json;

use super::*;

const V3: &str = r#"{"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "ep_size": 1,
    "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432,
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
                     "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "tie_word_embeddings": false, "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128,
    "vocab_size": 129280}"#;

/// Parameter counts of Transformers' classes, including expert biases.
#[rstest]
#[case::v3(V3, 671_026_419_200)]
#[case::v2(
    r#"{"architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 102400, "hidden_size": 5120,
        "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 60,
        "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 2,
        "n_routed_experts": 160, "routed_scaling_factor": 16.0, "topk_method": "group_limited_greedy",
        "n_group": 8, "topk_group": 3, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
        "norm_topk_prob": false, "scoring_func": "softmax", "max_position_embeddings": 163840}"#,
    235_741_434_880
)]
#[case::v2_lite(
    r#"{"architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 102400, "hidden_size": 2048,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
        "num_attention_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64,
        "topk_method": "greedy", "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6,
        "first_k_dense_replace": 1, "q_lora_rank": null, "max_position_embeddings": 163840}"#,
    15_706_484_224
)]
fn published_models_have_their_number_of_parameters(#[case] json: &str, #[case] params: usize) {
    let whole = read_text(json).unwrap();
    let config = whole.without_mtp();
    assert_eq!(config.whole_plan().unwrap().num_global(), params);
    let named: usize = config
        .hf_params()
        .unwrap()
        .iter()
        .map(|p| p.shape.iter().product::<usize>())
        .sum();
    assert_eq!(named, params);
    for config in [config, whole] {
        assert_eq!(read(&config.to_hf()).unwrap(), config);
    }
}

/// The MTP layer has the parameters of a layer with experts (DeepSeek reports 11.5 billion), plus
/// its matrix and three norms.
#[test]
fn deepseek_v3_has_a_layer_that_predicts_further_tokens() {
    let config = read_text(V3).unwrap();
    let params = |config: &DecoderConfig| config.whole_plan().unwrap().num_global();
    let own = params(&config) - params(&config.without_mtp());
    assert_eq!(
        (config.mtp_layers, own),
        (1, 11_507_286_272 + 2 * 7168 * 7168 + 3 * 7168)
    );
    let names = config
        .hf_params()
        .unwrap()
        .into_iter()
        .flat_map(|param| param.names());
    let names: Vec<_> = names
        .filter(|name| name.starts_with("model.layers.61."))
        .collect();
    for name in [
        "eh_proj",
        "enorm",
        "hnorm",
        "shared_head.norm",
        "mlp.experts.255.up_proj",
    ] {
        assert!(
            names.contains(&format!("model.layers.61.{name}.weight")),
            "{name}"
        );
    }
    let copies = [
        (
            "model.layers.61.embed_tokens.weight".to_string(),
            "embedding.weight",
        ),
        (
            "model.layers.61.shared_head.head.weight".to_string(),
            "head.weight",
        ),
    ];
    assert_eq!(config.hf_copies(), copies);
}

#[test]
fn a_token_of_deepseek_v3_goes_through_37_billion_parameters() {
    let config = read_text(V3).unwrap().without_mtp();
    let idle = 58 * (256 - 8) * 3 * 7168 * 2048;
    let active = config.whole_plan().unwrap().num_global() - idle;
    assert_eq!(active / 1_000_000_000, 37);
    let embedding = 129_280 * 7168;
    let routers = 58 * (7168 * 256 + 256);
    let norms = 61 * (2 * 7168 + 1536 + 512) + 7168;
    let matrices = active - embedding - routers - norms;
    // Per head, queries and keys have 192 features, values 128.
    let scores: usize = 61 * 128 * (192 + 128) * 4096;
    let expected = 4096.0 * (6.0 * matrices as f64 + 3.0 * scores as f64);
    assert_eq!(config.flop_shape().training(1, 4096), expected);
}

#[test]
fn a_published_deepseek_v3_is_read() {
    let config = read_text(V3).unwrap();
    let experts = config.experts.as_ref().unwrap();
    assert_eq!(
        (config.head_dim, experts.groups, experts.bias),
        (192, Some([8, 4, 2]), true)
    );
    assert_eq!(experts.dense_layers, [0, 1, 2]);
    assert_eq!((experts.shared_ffn, experts.sigmoid), (Some(2048), true));
    let RopeScaling::Yarn(yarn) = &config.positions.rotary().unwrap().scaling else {
        panic!("{:?}", config.positions)
    };
    assert_eq!((yarn.factor, yarn.original_max_position), (40.0, 4096));
    assert_eq!(config.rope().unwrap().head_dim, 64);
}

#[rstest]
#[case(Family::DEEPSEEK_V3, "attention_bias", json!(true), "only false is supported")]
#[case(Family::DEEPSEEK_V3, "num_key_value_heads", json!(2), "2 key/value heads for 4 query heads")]
#[case(Family::DEEPSEEK_V3, "topk_method", json!("greedy"), "only \"noaux_tc\" is supported")]
#[case(Family::DEEPSEEK_V3, "scoring_func", json!("softmax"), "only \"sigmoid\" is supported")]
#[case(Family::DEEPSEEK_V3, "moe_layer_freq", json!(2), "`moe_layer_freq` is 2, but only 1")]
#[case(Family::DEEPSEEK_V3, "n_shared_experts", json!(0), "`n_shared_experts` is 0")]
#[case(Family::DEEPSEEK_V3, "n_group", json!(3), "2 of 3 groups, 8 experts")]
#[case(Family::DEEPSEEK_V3, "qk_rope_head_dim", json!(7), "of head_dim 7")]
#[case(Family::DEEPSEEK_V3, "kv_lora_rank", json!(0), "`kv_lora_rank` is 0, which is out of range")]
#[case(Family::DEEPSEEK_V2, "topk_method", json!("noaux_tc"), "`topk_method` is noaux_tc; `greedy`")]
#[case(Family::DEEPSEEK_V2, "norm_topk_prob", json!(true), "only false is supported")]
#[case(
    Family::DEEPSEEK_V2,
    "num_experts_per_tok",
    Value::Null,
    "`num_experts_per_tok` is missing"
)]
#[case(Family::DEEPSEEK_V2, "num_attention_heads", json!(3), "is not a multiple of `num_attention_heads` 3")]
fn what_cannot_be_is_refused_by_name(
    #[case] family: Family,
    #[case] key: &str,
    #[case] value: Value,
    #[case] message: &str,
) {
    let mut json = family.template().to_hf();
    json[key] = value;
    let error = read(&json).unwrap_err();
    assert!(error.contains(message), "{error}");
}

#[rstest]
#[case(|config: &mut DecoderConfig| config.window = Some(3), "does not support `window`")]
#[case(|config: &mut DecoderConfig| config.qk_norm = Some(QkNormKind::Head), "does not support `qk_norm`")]
#[case(|config: &mut DecoderConfig| config.head_dim = 32, "`head_dim` is 32, but heads of latent")]
#[case(|config: &mut DecoderConfig| config.experts.as_mut().unwrap().shared_ffn = Some(200), "cannot express")]
#[case(|config: &mut DecoderConfig| config.experts.as_mut().unwrap().dense_layers = vec![1], "cannot express")]
fn what_no_config_says_is_refused(#[case] change: fn(&mut DecoderConfig), #[case] message: &str) {
    for family in [Family::DEEPSEEK_V2, Family::DEEPSEEK_V3] {
        let mut config = family.template();
        change(&mut config);
        let found = config.validate().and_then(|()| config.check_sayable());
        assert!(
            found
                .as_ref()
                .is_err_and(|e| e.to_string().contains(message)),
            "{found:?}"
        );
    }
}
