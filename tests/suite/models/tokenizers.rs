//! Training with a custom tokenizer.

use std::{fs, path::PathBuf};

use megaburn::data::{Corpus, Tokenizer, TokenizerTrainer};
use rstest::rstest;

use crate::runs::child::{Ended, Ranks};
use megaburn_test_support::run::Run;

/// Trains a tokenizer on the text of a run and saves it next to the text.
fn tokenizer(run: &Run, name: &str, vocab_size: usize) -> PathBuf {
    let corpus = Corpus::from_file(run.path("text.txt")).unwrap();
    let trained = TokenizerTrainer::new(vocab_size).train(&corpus).unwrap();
    assert_eq!(trained.tokenizer().vocab_size(), vocab_size);
    trained.save(run.path(name), false).unwrap();
    run.path(name)
}

fn start(run: &Run, layout: &str, steps: u64, sets: &[&str]) -> Ended {
    Ranks::threads(&run.args(layout, steps, sets))
        .wait_all()
        .remove(0)
}

#[track_caller]
fn assert_refused(ended: &Ended, message: &str) {
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(
        ended.stderr.contains(message),
        "expected: {message}\nfound: {ended:?}"
    );
    assert!(!ended.stderr.contains("panicked"), "{ended:?}");
}

#[rstest]
fn a_run_trains_resumes_and_writes_with_a_tokenizer_of_its_own(
    #[values("tp2-sp", "dp2")] layout: &str,
) {
    let run = Run::new();
    // 300 ids are divisible by 2 and more than a byte tokenizer needs.
    let path = format!("data.tokenizer={}", tokenizer(&run, "bpe", 300).display());
    let sample = ["generate.tokens=9", "generate.prompt='<|begin_of_text|>x'"];
    let sets = [&[path.as_str()], &sample[..]].concat();
    let ended = start(&run, layout, 3, &sets);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.contains("vocabulary 300"), "{ended:?}");
    assert!(ended.stdout.contains("bpe (300 ids)"), "{ended:?}");
    assert!(
        !ended.stdout.contains("<|begin_of_text|>"),
        "special tokens are no text: {ended:?}"
    );
    let losses: Vec<f64> = run.steps().iter().map(|step| step.loss).collect();
    assert!((losses[0] - 300f64.ln()).abs() < 0.5, "{losses:?}");

    let ended = start(&run, layout, 5, &sets);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.contains("after step 3 "), "{ended:?}");
    assert_eq!(run.steps().len(), 5);
}

#[test]
fn a_resumed_run_with_another_tokenizer_is_refused() {
    let run = Run::new();
    // The same sizes, so that only the tokens differ.
    let mine = format!("data.tokenizer={}", tokenizer(&run, "mine", 300).display());
    let other = tokenizer(&run, "other", 300);
    let names = fs::read_to_string(other.join("tokenizer_config.json")).unwrap();
    let names = names.replace("\"<|end_of_text|>\"", "\"<|begin_of_text|>\"");
    fs::write(other.join("tokenizer_config.json"), names).unwrap();
    let other = format!("data.tokenizer={}", other.display());
    let bytes = ["data.tokenizer=byte", "model.vocab=300"];

    assert_eq!(start(&run, "tp1", 1, &[&mine]).code, Some(0));
    let before = run.tensors(1);
    for sets in [&[other.as_str()][..], &bytes] {
        let ended = start(&run, "tp1", 2, sets);
        assert_refused(
            &ended,
            "a different sample order: the hash of the tokenizer is xxh3 ",
        );
    }
    assert_eq!(run.tensors(1), before);
    assert_eq!(start(&run, "tp1", 2, &[&mine]).code, Some(0));
}

#[rstest]
#[case(
    "bpe",
    "`data.tokenizer` is bpe: it must be `byte`, or the path of a tokenizer.json or of"
)]
#[case("no/such", "no tokenizer at `no/such`: no such file or folder")]
#[case(
    "src",
    "the folder has none of tokenizer.json, tokenizer.model, spiece.model, tiktoken.model, vocab.txt"
)]
fn a_path_without_a_tokenizer_is_named(#[case] path: &str, #[case] message: &str) {
    let run = Run::new();
    fs::create_dir(run.path("src")).unwrap();
    let path = if path == "src" {
        run.path("src").display().to_string()
    } else {
        path.into()
    };
    assert_refused(
        &start(&run, "tp1", 1, &[&format!("data.tokenizer={path}")]),
        message,
    );
    assert!(
        !run.path("run").exists(),
        "a refused run leaves nothing behind"
    );
}

#[test]
fn a_truncated_tokenizer_is_named() {
    let run = Run::new();
    let file = tokenizer(&run, "bpe", 280).join("tokenizer.json");
    let text = fs::read(&file).unwrap();
    fs::write(&file, &text[..text.len() / 2]).unwrap();
    let ended = start(
        &run,
        "tp1",
        1,
        &[&format!("data.tokenizer={}", file.display())],
    );
    assert_refused(
        &ended,
        "tokenizer.json` cannot be used as a tokenizer: EOF while parsing",
    );
    assert!(
        !run.path("run").exists(),
        "a refused run leaves nothing behind"
    );
}
