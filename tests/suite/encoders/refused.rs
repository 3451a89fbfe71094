//! What an encoder cannot do is refused by name.

use rstest::rstest;

use super::corpus::Sentences;
use crate::models::{
    round_trip::{megaburn, text},
    transformers::fixture,
};
use megaburn_test_support::text::fresh_seed;

#[rstest]
#[case(&["data.dataset=gpt"], "`data.dataset` is gpt: it must be \"bert\"")]
#[case(&["model.family=gpt2", "data.dataset=bert"], "`data.dataset` is bert: it must be \"gpt\"")]
#[case(&["parallel.cp=2"], "does not support `bidirectional` attention")]
#[case(&["model.window=4"], "`window` is set, but it only limits causal attention")]
#[case(&["model.experts.num=4", "model.parts.mlp_bias=false"], "`experts` need causal attention")]
#[case(&["model.mtp_layers=1"], "`mtp_layers` needs causal attention")]
#[case(&["model.parts.activation=swiglu"], "`masked_head` needs an `activation` that is not gated")]
#[case(&["model.parts.block_order=parallel"], "`norm_placement` post needs `block_order` serial")]
#[case(&["train.fused_linear_cross_entropy=true"], "`train.fused_linear_cross_entropy` is true: it must be false, because the model has a head of masked")]
#[case(&["data.masking.probability=1.5"], "data.masking.probability")]
#[case(&["data.masking.max_ngram=0"], "data.masking.max_ngram")]
#[case(&["data.documents=true"], "`data.documents` is set: it must be absent")]
#[case(&["data.seq_len=4"], "data.seq_len")]
#[case(&["data.tokenizer=byte"], "data.tokenizer")]
#[case(&["model.parts.token_types=1"], "`model.parts.token_types` is 1: it must be 0, or at least 2")]
#[case(&["model.parts.mup_base_hidden=8"], "would not be scaled")]
fn a_setting_that_does_not_fit_is_refused(#[case] sets: &[&str], #[case] message: &str) {
    let sentences = Sentences::new(10, fresh_seed());
    let own = sentences.settings();
    let mut args = vec!["train"];
    let batch = ["train.global_batch=2", "train.micro_batch=1"];
    let all = own.iter().map(String::as_str).chain(batch);
    let all = all.chain(sets.iter().copied());
    args.extend(all.flat_map(|set| ["--set", set]));
    if !sets.contains(&"parallel.cp=2") {
        args.extend(["--layout", "tp1"]);
    }
    let ended = megaburn(&args);
    assert_eq!(ended.code, Some(2), "{ended:#?}");
    assert!(ended.stderr.contains(message), "{ended:#?}");
}

#[test]
fn an_untied_head_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let hf = fixture("bert");
    let config = std::fs::read_to_string(hf.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    config["tie_word_embeddings"] = false.into();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let weights = "model.safetensors";
    std::fs::copy(hf.join(weights), dir.path().join(weights)).unwrap();
    let out = dir.path().join("out");
    let ended = megaburn(&["convert", "import", text(dir.path()), text(&out)]);
    assert_eq!(ended.code, Some(2), "{ended:#?}");
    assert!(ended.stderr.contains("tie_word_embeddings"), "{ended:#?}");
    assert!(!out.exists());
}

#[test]
fn text_is_not_generated() {
    let hf = fixture("bert");
    let ended = megaburn(&["generate", text(&hf), "--prompt-ids", "5,6"]);
    assert_eq!(ended.code, Some(2), "{ended:#?}");
    assert!(
        ended.stderr.contains("this bert model is an encoder"),
        "{ended:#?}"
    );
}

#[test]
fn a_text_is_no_data_set_of_sentences() {
    let sentences = Sentences::new(10, fresh_seed());
    let path = format!("data.path={}", sentences.path("text.jsonl").display());
    let own = sentences.settings();
    let mut args = vec!["train", "--layout", "tp1"];
    let all = own.iter().map(String::as_str).chain([path.as_str()]);
    args.extend(all.flat_map(|set| ["--set", set]));
    let ended = megaburn(&args);
    assert_eq!(ended.code, Some(2), "{ended:#?}");
    assert!(
        ended.stderr.contains("preprocess --split-sentences"),
        "{ended:#?}"
    );
}
