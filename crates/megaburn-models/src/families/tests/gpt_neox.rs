//! Tests of GPT-NeoX's `config.json` and of its tensor of queries, keys and values.

use super::{super::unread::unread, *};

/// The published file of Pythia 160M.
pub(super) const PYTHIA_160M: &str = r#"{"architectures": ["GPTNeoXForCausalLM"],
    "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu", "hidden_size": 768,
    "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 12,
    "num_hidden_layers": 12, "rotary_emb_base": 10000, "rotary_pct": 0.25,
    "tie_word_embeddings": false, "torch_dtype": "float16", "transformers_version": "4.24.0",
    "use_cache": true, "use_parallel_residual": true, "vocab_size": 50304}"#;

#[test]
fn the_published_keys_mean_what_todays_rope_parameters_mean() {
    let published: Value = serde_json::from_str(PYTHIA_160M).unwrap();
    let with = |base: f64, part: f64| {
        let mut json = published.clone();
        json["rotary_emb_base"] = base.into();
        json["rotary_pct"] = part.into();
        let config = read(&json).unwrap();
        assert!(unread(&json, config.family).unwrap().is_empty());
        let mut today = published.clone();
        today["rope_parameters"] =
            json!({"rope_type": "default", "rope_theta": base, "partial_rotary_factor": part});
        assert_eq!(read(&today).unwrap(), config);
        config.positions.rotary().unwrap().clone()
    };
    for (base, part) in [(10_000.0, 0.25), (500.0, 1.0), (777.0, 0.5)] {
        let rotary = with(base, part);
        assert_eq!((rotary.theta, rotary.percent), (base, part));
    }
    let mut llama: Value = serde_json::from_str(LLAMA_3_1).unwrap();
    llama["rotary_pct"] = 0.25.into();
    let error = unread(&llama, Family::LLAMA).unwrap_err();
    assert!(error.contains("`rotary_pct` is 0.25"), "{error}");
}

#[rstest]
#[case("hidden_act", json!("relu2"), "`hidden_act` is relu2; gelu_new, gelu_fast")]
#[case("hidden_size", json!(770), "`hidden_size` 770 is not a multiple of `num_attention_heads` 12")]
#[case("num_attention_heads", json!(0), "is not a multiple of `num_attention_heads` 0")]
#[case("rotary_pct", json!("0.25"), "`rotary_pct` is \"0.25\", expected a number")]
#[case("rotary_pct", json!(0.02), "rotary_percent 0.02")]
fn what_has_no_meaning_is_refused_by_name(
    #[case] key: &str,
    #[case] value: Value,
    #[case] message: &str,
) {
    let mut json: Value = serde_json::from_str(PYTHIA_160M).unwrap();
    json[key] = value;
    let error = read(&json).unwrap_err();
    assert!(error.contains(message), "{error}");
}

/// The rows of the tensor are the query, the key and the value of each head.
#[test]
fn the_tensor_of_queries_keys_and_values_is_stored_head_by_head() {
    let config = DecoderConfig {
        hidden: 24,
        heads: 3,
        kv_heads: 3,
        head_dim: 8,
        ..Family::GPT_NEOX.template()
    };
    let params = config.hf_params().unwrap();
    for (kind, shape) in [("weight", vec![24, 72]), ("bias", vec![72])] {
        let path = format!("blocks.1.attention.qkv.{kind}");
        let param = params.iter().find(|param| param.path == path).unwrap();
        let [part] = param.parts.as_slice() else {
            panic!("{param:?}");
        };
        assert_eq!(param.shape, shape);
        let name = format!("gpt_neox.layers.1.attention.query_key_value.{kind}");
        assert_eq!(part.name, name);
        let columns: Vec<usize> = part.columns.iter().cloned().flatten().collect();
        let of_head = |head: usize| (0..24).map(move |at| at / 8 * 24 + head * 8 + at % 8);
        let expected: Vec<usize> = (0..3).flat_map(of_head).collect();
        assert_eq!(columns, expected);
    }
}
