//! What does not fit an encoder-decoder model is refused by name.

use rstest::rstest;

use crate::{
    encoders::corpus::Sentences,
    models::round_trip::{megaburn, succeed, text},
};
use megaburn_test_support::text::fresh_seed;

#[rstest]
#[case(&["data.dataset=gpt"], "`data.dataset` is gpt: it must be \"t5\": the model has an encoder and a decoder")]
#[case(&["data.dataset=bert"], "`data.dataset` is bert: it must be \"t5\"")]
#[case(&["model.family=llama", "model.encoder_layers=0", "data.dataset=t5"], "`data.dataset` is t5: it must be \"gpt\": the model has no decoder that reads")]
#[case(&["model.family=bert", "model.encoder_layers=0", "data.dataset=t5"], "`data.dataset` is t5: it must be \"bert\"")]
#[case(&["data.decoder_seq_len=1"], "`data.decoder_seq_len` is 1: it must be at least 2")]
#[case(&["data.decoder_seq_len=2"], "tokens for the decoder, whose sequence length is 2; give a longer one (data.decoder_seq_len)")]
#[case(&["data.documents=true"], "`data.documents` is set: it must be absent with data.dataset = \"t5\"")]
#[case(&["data.fim.rate=0.5"], "`data.fim` is set: it must be absent with data.dataset = \"t5\"")]
#[case(&["data.masking.max_ngram=0"], "data.masking.max_ngram")]
#[case(&["data.seq_len=3"], "data.seq_len")]
#[case(&["data.tokenizer=byte"], "data.tokenizer")]
#[case(&["data.masking.probability=0.9", "data.decoder_seq_len=48"], "sentinels; give it more (`<extra_id_N>`)")]
fn a_setting_that_does_not_fit_is_refused(#[case] sets: &[&str], #[case] message: &str) {
    let sentences = Sentences::new(10, fresh_seed()).for_t5();
    let own = sentences.settings();
    let mut args = vec!["train", "--layout", "tp1"];
    let batch = ["train.global_batch=2", "train.micro_batch=1"];
    let all = own.iter().map(String::as_str).chain(batch);
    let all = all.chain(sets.iter().copied());
    args.extend(all.flat_map(|set| ["--set", set]));
    let ended = megaburn(&args);
    assert_eq!(ended.code, Some(2), "{ended:#?}");
    assert!(ended.stderr.contains(message), "{ended:#?}");
}

#[rstest]
#[case("cp2", &[], "context parallelism (cp2)")]
#[case("tp4-sp", &["data.decoder_seq_len=10"], "sequence length 10 is not divisible")]
#[case("tp4-sp", &["data.seq_len=26"], "sequence length 26 is not divisible")]
fn a_layout_that_does_not_fit_is_refused(
    #[case] layout: &str,
    #[case] sets: &[&str],
    #[case] message: &str,
) {
    let sentences = Sentences::new(10, fresh_seed()).for_t5();
    let own = sentences.settings();
    let mut args = vec!["train", "--layout", layout];
    let all = own.iter().map(String::as_str).chain(sets.iter().copied());
    args.extend(all.flat_map(|set| ["--set", set]));
    let ended = megaburn(&args);
    assert_eq!(ended.code, Some(2), "{ended:#?}");
    assert!(ended.stderr.contains(message), "{ended:#?}");
}

#[test]
fn a_text_is_no_data_set_of_sentences() {
    let sentences = Sentences::new(10, fresh_seed()).for_t5();
    let path = format!("data.path={}", sentences.path("text.jsonl").display());
    let own = sentences.settings();
    let mut args = vec!["train", "--layout", "tp1"];
    let all = own.iter().map(String::as_str).chain([path.as_str()]);
    args.extend(all.flat_map(|set| ["--set", set]));
    let ended = megaburn(&args);
    assert_eq!(ended.code, Some(2), "{ended:#?}");
    let message = "preprocess --split-sentences";
    assert!(ended.stderr.contains(message), "{ended:#?}");
}

/// A model with fewer key heads trains, but is no T5.
#[test]
fn grouped_heads_cannot_be_exported() {
    let sentences = Sentences::new(10, fresh_seed()).for_t5();
    let own = sentences.settings();
    let sets = [
        "model.kv_heads=2",
        "train.global_batch=2",
        "train.micro_batch=1",
    ];
    let all = own.iter().map(String::as_str).chain(sets);
    let mut args = vec!["train", "--layout", "tp1"];
    args.extend(all.flat_map(|set| ["--set", set]));
    let message = "`kv_heads` is 2, which the config.json of t5 cannot express (it would mean 4)";
    let said = succeed(&args);
    assert!(said.contains(message), "{said}");
    let [run, back] = ["run", "back"].map(|name| sentences.path(name));
    let ended = megaburn(&["convert", "export", text(&run), text(&back)]);
    assert_eq!(ended.code, Some(2), "{ended:#?}");
    assert!(ended.stderr.contains(message), "{ended:#?}");
}

/// Version 4 of Transformers derives the scale of logits from tied embeddings.
#[rstest]
#[case(&[], false)]
#[case(&["model.tied=true"], true)]
#[case(&["model.tied=true", "model.parts.logits_scaling=4"], false)]
#[case(&["model.parts.logits_scaling=4"], true)]
fn an_export_that_version_4_reads_otherwise_is_warned_of(
    #[case] sets: &[&str],
    #[case] is_warned: bool,
) {
    let sentences = Sentences::new(10, fresh_seed()).for_t5();
    let own = sentences.settings();
    let batch = ["train.global_batch=2", "train.micro_batch=1"];
    let all = own.iter().map(String::as_str).chain(batch);
    let all = all.chain(sets.iter().copied());
    let mut args = vec!["train", "--layout", "tp1"];
    args.extend(all.flat_map(|set| ["--set", set]));
    succeed(&args);
    let [run, back] = ["run", "back"].map(|name| sentences.path(name));
    let ended = megaburn(&["convert", "export", text(&run), text(&back)]);
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    let said = ended
        .stderr
        .contains("version 4 of Transformers takes the logits");
    assert_eq!(said, is_warned, "{ended:#?}");
}
