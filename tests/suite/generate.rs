//! `megaburn generate` with text: tokenizers, stop strings, sampling, ranks.

use std::{fs, path::PathBuf};

use rstest::rstest;
use serde_json::Value;

use crate::{
    child::Ranks,
    fixtures::fixture,
    models::{megaburn, succeed, text},
};

/// A model of 300 token ids with the byte-level tokenizer that `megaburn tokenize` writes.
fn model_with_tokenizer() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let (hf, corpus) = (dir.path().join("hf"), dir.path().join("corpus.txt"));
    fs::create_dir(&hf).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(fixture("qwen3-tied").join(file), hf.join(file)).unwrap();
    }
    fs::write(&corpus, "the cat sat on the mat; the hat that the cat had. ".repeat(50)).unwrap();
    succeed(&["tokenize", "--data", text(&corpus), "--vocab", "280", "--out", text(&hf)]);
    (dir, hf)
}

fn written(args: &[&str]) -> Vec<Value> {
    let found = succeed(&[args, &["--json"]].concat());
    found.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn text_goes_in_and_out_with_the_models_own_tokenizer() {
    let (dir, hf) = model_with_tokenizer();
    let checkpoint = dir.path().join("checkpoint");
    succeed(&["convert", "import", text(&hf), text(&checkpoint)]);
    let ask = ["--prompt", "the cat", "--prompt", "sat on a", "--max-tokens", "20"];
    let alone = written(&[&["generate", text(&hf)], &ask[..]].concat());
    assert!(alone.iter().all(|line| line["finish"] == "max_tokens"), "{alone:?}");
    assert_eq!(
        alone,
        written(&[&["generate", text(&checkpoint), "--layout", "tp2"], &ask[..]].concat())
    );
    let plain = succeed(&[&["generate", text(&hf)], &ask[..]].concat());
    let expected = format!(
        "the cat{}\n---\nsat on a{}\n",
        alone[0]["text"].as_str().unwrap(),
        alone[1]["text"].as_str().unwrap()
    );
    assert_eq!(plain, expected);

    // A stop string ends the text where it first begins, whatever tokens it is in.
    let draw = |seed: usize, stop: &[&str]| {
        let seed = seed.to_string();
        let args = ["generate", text(&hf), "--prompt", "the cat", "--max-tokens", "24", "--seed"];
        let stop = stop.iter().flat_map(|stop| ["--stop", stop]);
        let args = args.into_iter().chain([seed.as_str(), "--temperature", "1.5"]).chain(stop);
        written(&args.collect::<Vec<_>>()).remove(0)
    };
    for len in [1, 3, 5] {
        let found = (0..100).find_map(|seed| {
            let whole = draw(seed, &[])["text"].as_str().unwrap().to_string();
            let is_plain = |at: &usize| {
                let part = whole.get(*at..at + len);
                part.is_some_and(|part| part.chars().all(|c| c.is_ascii_lowercase() || c == ' '))
            };
            let at = (4..whole.len()).find(is_plain)?;
            Some((seed, whole[at..at + len].to_string(), whole))
        });
        let (seed, stop, whole) = found.expect("a text with plain characters");
        let stopped = draw(seed, &["never written", &stop]);
        assert_eq!(stopped["text"], whole[..whole.find(&stop).unwrap()], "{stop:?} in {whole:?}");
        assert_eq!(stopped["finish"], "stop");
    }
}

#[test]
fn processes_write_what_threads_write_and_one_of_them_prints() {
    let (_dir, hf) = model_with_tokenizer();
    let ask = |seed| {
        let args = ["generate", text(&hf), "--prompt", "the", "--max-tokens", "12", "--seed", seed];
        [&args[..], &["--temperature", "0.9", "--top-k", "40", "--top-p", "0.9"]].concat()
    };
    let threads = succeed(&[&ask("7")[..], &["--layout", "tp4"]].concat());
    assert_eq!(threads, succeed(&ask("7")));
    assert_ne!(threads, succeed(&ask("8")));
    let ended = Ranks::commands(2, &ask("7")).finish();
    assert_eq!((&ended[0].stdout, ended[1].stdout.as_str()), (&threads, ""));
}

#[rstest]
#[case(&["--prompt", "a"], "for the model has no tokenizer")]
#[case(&[], "`--prompt` is absent")]
#[case(&["--prompt-ids", "1,x"], "`--prompt-ids` is \"1,x\"")]
#[case(&["--prompt-ids", "256"], "prompt 0 has token 256, and the model's vocabulary is 256")]
#[case(&["--prompt-ids", "1", "--stop", "x"], "for the model has no tokenizer")]
#[case(&["--prompt", "a", "--tokenizer", "byte", "--stop", ""], "`--stop` is empty")]
#[case(&["--prompt-ids", "1", "--top-k", "0"], "top-k is 0")]
#[case(&["--prompt-ids", "1", "--top-p", "1.5"], "top-p is 1.5")]
#[case(&["--prompt-ids", "1", "--temperature=-1"], "temperature is -1")]
#[case(&["--prompt-ids", "1", "--layout", "dp2"], "generation splits the model over ranks, and nothing else")]
#[case(&["--prompt-ids", "1", "--layout", "tp16"], "attention heads 8 is not divisible by tp 16")]
#[case(&["--prompt-file", "/no/such/file"], "cannot read `/no/such/file`")]
#[case(&["--prompt", "a", "--tokenizer", "/no/such"], "/no/such")]
fn what_cannot_be_asked_is_refused(#[case] args: &[&str], #[case] message: &str) {
    let hf = fixture("llama");
    let ended = megaburn(&[&["generate", text(&hf)], args].concat());
    assert_eq!(ended.code, Some(2), "{ended:#?}");
    assert!(ended.stderr.contains(message), "{ended:#?}");
    assert_eq!((ended.stderr.lines().count(), ended.stdout.as_str()), (1, ""));
}
