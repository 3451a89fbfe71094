//! The files in `configs/`.

use std::{fs, path::Path};

use megaburn::{
    models::DecoderConfig,
    train::{ConfigLayers, TrainConfig},
};
use rstest::rstest;
use serde_json::Value;

use crate::runs::child::Ranks;

/// Each recipe with its layout, the number of parameters of the published model, and the parts of
/// its published `config.json` that define what is computed.
const PUBLISHED: [(&str, &str, usize, &str); 7] = [
    (
        "gpt2",
        "dp8",
        124_439_808,
        r#"{"architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new", "n_embd": 768,
            "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257,
            "layer_norm_epsilon": 1e-05}"#,
    ),
    (
        "llama-3-8b",
        "dp8",
        8_030_261_248,
        r#"{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "hidden_act": "silu",
            "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 8192,
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 500000.0,
            "tie_word_embeddings": false, "vocab_size": 128256}"#,
    ),
    (
        "llama-3-70b",
        "tp8-pp4-dp2-sp",
        70_553_706_496,
        r#"{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "hidden_act": "silu",
            "hidden_size": 8192, "intermediate_size": 28672, "max_position_embeddings": 8192,
            "num_attention_heads": 64, "num_hidden_layers": 80, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 500000.0,
            "tie_word_embeddings": false, "vocab_size": 128256}"#,
    ),
    (
        "mistral-7b",
        "dp8",
        7_241_732_096,
        r#"{"architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
            "intermediate_size": 14336, "max_position_embeddings": 32768,
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
            "tie_word_embeddings": false, "vocab_size": 32000}"#,
    ),
    (
        "qwen3-8b",
        "dp8",
        8_190_735_360,
        r#"{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288,
            "max_position_embeddings": 32768, "max_window_layers": 36, "num_attention_heads": 32,
            "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
            "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
            "tie_word_embeddings": false, "use_sliding_window": false, "vocab_size": 151936}"#,
    ),
    (
        "bert-base",
        "dp8",
        110_106_428,
        r#"{"architectures": ["BertForPreTraining"], "hidden_act": "gelu", "hidden_size": 768,
            "intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512,
            "num_attention_heads": 12, "num_hidden_layers": 12, "type_vocab_size": 2,
            "vocab_size": 30522}"#,
    ),
    (
        "t5-base",
        "dp8",
        247_577_856,
        r#"{"architectures": ["T5ForConditionalGeneration"], "d_ff": 2048, "d_kv": 64, "d_model": 768,
            "feed_forward_proj": "gated-gelu", "layer_norm_epsilon": 1e-06, "num_decoder_layers": 12,
            "num_heads": 12, "num_layers": 12, "relative_attention_num_buckets": 32,
            "tie_word_embeddings": false, "vocab_size": 32128}"#,
    ),
];

fn folder() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../configs"))
}

fn read(name: &str) -> TrainConfig {
    let layers = ConfigLayers::new().with_file(folder().join(format!("{name}.toml")));
    layers.and_then(ConfigLayers::load).unwrap()
}

#[rstest]
fn a_recipe_is_the_published_model(#[values(0, 1, 2, 3, 4, 5, 6)] index: usize) {
    let (name, layout, params, json) = PUBLISHED[index];
    let config = read(name);
    // Pass 0 token ids, because a recipe sets its own vocabulary.
    let model = config.model.decoder(config.data.seq_len, 0);
    assert_eq!(model.whole_plan().unwrap().num_global(), params);
    let json: Value = serde_json::from_str(json).unwrap();
    let published = DecoderConfig::from_hf(&json, Path::new("config.json")).unwrap();
    assert!(model.max_seq_len <= published.max_seq_len);
    assert_eq!(
        model,
        DecoderConfig {
            max_seq_len: model.max_seq_len,
            ..published
        }
    );

    let found = config.layout(None).unwrap();
    assert_eq!(found.to_string(), layout);
    let nodes = if name == "llama-3-70b" { 8 } else { 1 };
    assert_eq!(found.world_size(), nodes * 8);
    let tokens = config.tokens_per_step() as f64;
    assert!((5e5..5e6).contains(&tokens), "{tokens} tokens a step");
    assert!(String::from(config.data.tokenizer).starts_with("models/"));
}

#[test]
fn every_recipe_is_tested_and_has_a_run_of_its_own() {
    let mut found: Vec<String> = fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "toml")
        })
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_string())
        .collect();
    found.sort();
    let mut known: Vec<&str> = PUBLISHED.map(|(name, ..)| name).to_vec();
    known.extend(["llama-tiny", "recipes"]);
    known.sort();
    assert_eq!(found, known);
    // `recipes` is a table of others, which have tests of their own.
    for name in known.into_iter().filter(|name| *name != "recipes") {
        assert_eq!(read(name).run.dir, format!("runs/{name}"));
    }
}

/// Long phases have limits of their own, so a larger timeout would only hide a hung rank.
#[rstest]
fn a_recipe_leaves_the_time_limits_as_they_are(#[values(0, 1, 2, 3, 4, 5, 6)] index: usize) {
    let found = read(PUBLISHED[index].0).train;
    let default = TrainConfig::default().train;
    assert_eq!(
        (found.timeout(), found.phase_limits(), found.step_timeout()),
        (
            default.timeout(),
            default.phase_limits(),
            default.step_timeout()
        )
    );
}

#[test]
fn a_recipe_without_its_tokenizer_is_one_error_that_says_so() {
    let path = folder().join("gpt2.toml");
    let ended = Ranks::command(&["train", "--config", path.to_str().unwrap()])
        .wait_all()
        .remove(0);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    let error = "error: no tokenizer at `models/gpt2`: no such file or folder";
    assert!(
        ended.stderr.starts_with(error) && ended.stderr.lines().count() == 1,
        "{ended:?}"
    );
    assert!(ended.stdout.is_empty(), "{ended:?}");
}
