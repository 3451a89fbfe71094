//! Tests that sizes that no model has are refused with the name of the key, before anything is
//! computed from them.

use super::*;

/// The integers of a family's `config.json`, together with the keys that they need to be used.
#[rstest]
#[case(Family::LLAMA, &["num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "head_dim", "max_position_embeddings"])]
#[case(Family::GPT2, &["n_layer", "n_embd", "n_inner", "n_positions"])]
#[case(Family::MIXTRAL, &["num_hidden_layers", "num_local_experts", "num_experts_per_tok"])]
#[case(Family::QWEN2, &["num_hidden_layers", "sliding_window", "max_window_layers"])]
#[case(Family::QWEN3_MOE, &["num_hidden_layers", "num_experts", "moe_intermediate_size", "decoder_sparse_step"])]
#[case(Family::QWEN2_MOE, &["num_experts", "shared_expert_intermediate_size", "moe_intermediate_size", "sliding_window"])]
#[case(Family::DEEPSEEK_V2, &["num_hidden_layers", "first_k_dense_replace", "n_shared_experts", "kv_lora_rank"])]
#[case(Family::DEEPSEEK_V3, &["num_hidden_layers", "num_nextn_predict_layers", "n_routed_experts", "n_group"])]
fn an_absurd_size_is_refused_by_its_key(#[case] family: Family, #[case] keys: &[&str]) {
    for key in keys {
        for size in [
            1u64 << 31,
            10_000_000_000,
            10u64.pow(18),
            4 * 10u64.pow(18),
            u64::MAX,
        ] {
            let mut json = family.template().to_hf();
            json["use_sliding_window"] = true.into();
            json["sliding_window"] = 9.into();
            json.as_object_mut().unwrap().remove("layer_types");
            json[*key] = size.into();
            let error = read(&json).unwrap_err();
            assert!(
                error.contains(&format!("`{key}` is {size}, which is too large")),
                "{error}"
            );
        }
    }
}

/// Each size is within its limit, but their product is not.
#[test]
fn sizes_whose_product_no_model_has_are_refused() {
    let mut json = Family::LLAMA.template().to_hf();
    for key in ["hidden_size", "intermediate_size", "vocab_size"] {
        json[key] = (1u64 << 30).into();
    }
    let error = read(&json).unwrap_err();
    assert!(error.contains("parameters, which is too large"), "{error}");

    let mut json = Family::QWEN3_MOE.template().to_hf();
    json["num_experts"] = 1_000_000_000.into();
    let error = read(&json).unwrap_err();
    assert!(
        error.contains("1000000000 experts in each of 4 layers"),
        "{error}"
    );
}
