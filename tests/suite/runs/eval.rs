//! `megaburn eval`: the same losses under every layout, of runs, checkpoints and models.

use std::path::Path;

use megaburn::report::metrics::{MetricsRecord, read_metrics};
use megaburn_test_support::{
    run::Run,
    text::{fresh_seed, write_random_text},
};
use rstest::rstest;
use serde_json::Value;

use crate::runs::child::{Ended, Ranks};

fn eval(path: &Path, args: &[&str]) -> Ended {
    let path = path.to_str().unwrap();
    Ranks::command(&[&["eval", path], args].concat())
        .wait_all()
        .remove(0)
}

fn losses(ended: &Ended) -> Value {
    assert_eq!(ended.code, Some(0), "{ended:?}");
    serde_json::from_str(&ended.stdout).unwrap()
}

/// A trained run, and two texts next to it: `a.txt` and `b.txt`.
fn trained() -> Run {
    let run = Run::new();
    write_random_text(&run.path("a.txt"), 1_000, fresh_seed());
    write_random_text(&run.path("b.txt"), 700, fresh_seed() ^ 1);
    let valid = format!("data.valid=[{{path={:?}}}]", run.path("a.txt"));
    let sets = [valid.as_str(), "train.eval_batches=1000"];
    Ranks::threads(&run.args("tp1", 6, &sets)).finish();
    run
}

#[test]
fn every_layout_gives_the_losses_of_one_rank_and_of_the_run() {
    let run = trained();
    let data = [
        format!("first={}", run.path("a.txt").display()),
        run.path("b.txt").display().to_string(),
    ];
    let of = |layout: &str| {
        let args = [
            "--data", &data[0], "--data", &data[1], "--json", "--layout", layout,
        ];
        losses(&eval(&run.path("run"), &args))
    };
    let one = of("tp1");
    let sets = one["sets"].as_array().unwrap();
    assert_eq!(
        (&sets[0]["name"], &sets[1]["name"]),
        (&"first".into(), &"b.txt".into())
    );
    assert_eq!(one["seq_len"], 16, "that of the run");
    // 1,000 bytes are 62 samples of 16 tokens, whose last token is followed by another one.
    assert_eq!(sets[0]["tokens"], 62 * 16);
    let number = |set: &Value, key: &str| set[key].as_f64().unwrap();
    for set in sets {
        let loss = number(set, "loss");
        assert!((number(set, "perplexity") / loss.exp() - 1.0).abs() < 1e-12);
        // A token of this run is a byte.
        assert!((number(set, "loss_per_byte") - loss).abs() < 1e-9);
        let bits = number(set, "bits_per_byte") * std::f64::consts::LN_2;
        assert!((bits - loss).abs() < 1e-9);
    }
    let records = read_metrics(run.path("run/metrics.jsonl")).unwrap();
    let last = records.iter().rev().find_map(|record| match record {
        MetricsRecord::Eval(eval) => Some(eval.eval_loss),
        MetricsRecord::Step(_) => None,
    });
    let last = last.unwrap();
    assert!(
        (number(&sets[0], "loss") - last).abs() < 1e-6,
        "{last} in the run: {one}"
    );
    for layout in ["tp2-dp2-sp", "pp2", "cp2", "dp3"] {
        let found = of(layout);
        assert_eq!(found["layout"], layout);
        for (set, expected) in found["sets"].as_array().unwrap().iter().zip(sets) {
            assert_eq!(set["tokens"], expected["tokens"], "{layout}");
            let [found, expected] = [set, expected].map(|set| number(set, "loss"));
            assert!(
                (found - expected).abs() < 1e-5,
                "{layout}: {found} and {expected}"
            );
        }
    }
}

#[test]
fn ranks_that_are_processes_print_once() {
    let run = trained();
    let (path, data) = (run.path("run"), run.path("b.txt"));
    let args = [
        "eval",
        path.to_str().unwrap(),
        "--data",
        data.to_str().unwrap(),
        "--layout",
        "dp2",
    ];
    let ended = Ranks::commands(2, &args).finish();
    let text = &ended[0].stdout;
    assert!(
        text.contains("eval     b.txt  loss ") && text.contains(" per byte ("),
        "{text}"
    );
    assert_eq!(ended[1].stdout, "");
}

#[test]
fn a_checkpoint_and_its_hugging_face_folder_have_the_losses_of_the_run() {
    let run = trained();
    let data = run.path("b.txt");
    let data = data.to_str().unwrap();
    let of = |path: &Path, sets: &[&str]| {
        let args = [&["--data", data, "--json", "--tokenizer", "byte"], sets].concat();
        losses(&eval(path, &args))["sets"][0]["loss"]
            .as_f64()
            .unwrap()
    };
    let expected = of(&run.path("run"), &[]);
    let checkpoint = run.checkpoints().join("step-00000006");
    assert_eq!(of(&checkpoint, &[]), expected);
    let folder = run.path("hf");
    let args = [
        "convert",
        "export",
        run.path("run").to_str().unwrap(),
        folder.to_str().unwrap(),
    ]
    .map(String::from);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    Ranks::command(&args).finish();
    let found = of(
        &folder,
        &["--set", "data.seq_len=16", "--set", "train.dtype=f32"],
    );
    assert!((found - expected).abs() < 1e-5, "{found} and {expected}");
}

#[rstest]
#[case(&[], "--data")]
#[case(&["--data", "no-such-file.txt"], "no-such-file.txt")]
#[case(&["--data", "x=Cargo.toml", "--data", "x=suite/main.rs"], "\"x\" twice")]
#[case(&["--data", "Cargo.toml", "--layout", "tp3"], "tp 3")]
#[case(&["--data", "Cargo.toml", "--set", "data.seq_len=100000"], "sequences of 100000 tokens exceed the model's limit of 16")]
fn bad_input_is_one_clear_error(#[case] args: &[&str], #[case] message: &str) {
    let run = Run::new();
    Ranks::threads(&run.args("tp1", 1, &[])).finish();
    let ended = eval(&run.path("run"), args);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains(message), "{ended:?}");
    assert_eq!(ended.stderr.matches("error: ").count(), 1, "{ended:?}");
}
